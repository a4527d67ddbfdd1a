"""Report of versions, devices, and the dtypes that each backend supports on this machine."""

from __future__ import annotations

import os
import platform

import torch

import sigattn
from sigattn.ops.attention import DENSE
from sigattn.ops.problem import Problem

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def list_devices() -> list[torch.device]:
    """Return the CPU and all accelerators that PyTorch can use."""
    devices = [torch.device("cpu")]
    if torch.accelerator.is_available():
        devices += [
            torch.device(f"{torch.accelerator.current_accelerator()}:{i}")
            for i in range(torch.accelerator.device_count())
        ]
    return devices


def describe() -> str:
    """Return the text that ``sigattn info`` prints."""
    lines = [
        f"sigattn {sigattn.__version__}, torch {torch.__version__}, Python {platform.python_version()}",
        f"CPU: {platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, "
        f"{torch.backends.cpu.get_cpu_capability()}",
    ]
    accelerators = list_devices()[1:]
    lines += [f"{d}: {_name(d)}" for d in accelerators] or ["no accelerator that PyTorch can use"]
    for device in list_devices():
        lines.append(f"\non {device}:")
        lines += _backends(device)
    return "\n".join(lines)


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _backends(device: torch.device) -> list[str]:
    """Return lines that list, for each backend, the supported dtypes and the reason for each unsupported one."""
    lines = []
    defaults = {dtype: DENSE.choose(_example(device, dtype), None) for dtype in _DTYPES}
    for name, backend in DENSE.backends.items():
        reasons = {dtype: backend.unavailable(_example(device, dtype)) for dtype in _DTYPES}
        supported = [
            f"{_short(d)} (default)" if defaults[d] == name else _short(d)
            for d, reason in reasons.items()
            if reason is None
        ]
        lines.append(f"  {name:<10} {', '.join(supported) or 'nothing'}")
        lines += [f"             not {_short(d)}: {reason}" for d, reason in reasons.items() if reason is not None]
    return lines


def _example(device: torch.device, dtype: torch.dtype) -> Problem:
    t = torch.empty(1, 1, 128, 64, device=device, dtype=dtype)
    return Problem(t, t, t)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
