"""Report of versions, devices, and the dtypes that each backend supports on this machine."""

import os
import platform

import torch

import sigattn
from sigattn.ops.attention import DENSE
from sigattn.ops.problem import Problem

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def describe() -> str:
    """Return the text that ``sigattn info`` prints."""
    kind = torch.accelerator.current_accelerator()
    accelerators = [torch.device(f"{kind}:{i}") for i in range(torch.accelerator.device_count())]
    lines = [
        f"sigattn {sigattn.__version__}, torch {torch.__version__}, Python {platform.python_version()}",
        f"CPU: {platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, "
        f"{torch.backends.cpu.get_cpu_capability()}",
        *(f"{d}: {torch.cuda.get_device_name(d) if d.type == 'cuda' else d.type}" for d in accelerators),
    ]
    if not accelerators:
        lines.append("no accelerator that PyTorch can use")
    for device in (torch.device("cpu"), *accelerators):
        lines += [f"\non {device}:", *_backends(device)]
    return "\n".join(lines)


def _backends(device: torch.device) -> list[str]:
    """Return lines that list, for each backend, the supported dtypes and the reason for each unsupported one."""
    tensors = {str(d).removeprefix("torch."): torch.empty(1, 1, 128, 64, device=device, dtype=d) for d in _DTYPES}
    problems = {dtype: Problem(t, t, t) for dtype, t in tensors.items()}
    defaults = {dtype: DENSE.choose(problem, None) for dtype, problem in problems.items()}
    lines = []
    for name, backend in DENSE.backends.items():
        reasons = {dtype: backend.unavailable(problem) for dtype, problem in problems.items()}
        supported = [f"{d} (default)" if defaults[d] == name else d for d, reason in reasons.items() if reason is None]
        lines.append(f"  {name:<10} {', '.join(supported) or 'nothing'}")
        lines += [f"             not {dtype}: {reason}" for dtype, reason in reasons.items() if reason is not None]
    return lines
