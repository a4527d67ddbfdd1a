"""Stand-in for a GPU driver: Triton's JIT on CPU tensors, for an absent architecture.

Within ``gpu(90)`` Triton binds the arguments of a launch, specialises, compiles for the architecture and loads the
binary as on a GPU, then hands the launch to ``Launcher``, which checks it against what was compiled and records it.
Nothing is executed: outputs are uninitialised. Tests of the launch alone omit the compilation, which takes one to two
seconds per kernel (``compiles=False``). It needs a process without TRITON_INTERPRET=1, because
``triton.jit`` chooses between compiler and interpreter when a kernel is defined.

>>> with gpu(90) as launched:
...     sigmoid_attention(q, k, v, backend="triton")
... launched[0].name, launched[0].grid, launched[0].options.BLOCK_M
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from triton import compiler
from triton._utils import canonicalize_dtype
from triton.backends.compiler import GPUTarget
from triton.runtime import driver as drivers

from sigattn.ops import call_cache
from sigattn.ops import triton as backend
from sigattn.ops.hopper import launch as launch_hopper
from sigattn.ops.triton import kernel_args

# Shared memory of a program in bytes (CUDA C++ Programming Guide, table of technical specifications; AMD: LDS).
_KIB = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 120: 99, "gfx942": 64, "gfx1100": 64}
SHARED = {architecture: kib * 1024 for architecture, kib in _KIB.items()}
MULTIPROCESSORS = 132
_LARGEST_GRID = (2**31 - 1, 65535, 65535)
_LARGEST_BOX = 256  # entries of a TMA box along one dimension
_SWIZZLES = (0, 32, 64, 128)  # bytes, by CUtensorMapSwizzle
_files = itertools.count()
_devices = itertools.count(1000)  # a device of its own for each stand-in: Triton caches kernels by device


class LaunchError(RuntimeError):
    """A launch that a driver would refuse, or that does not match the compiled kernel."""


@dataclass(frozen=True, repr=False)
class Launched:
    """A launch as the driver would receive it."""

    function: Any  # triton's JITFunction
    grid: tuple[int, int, int]
    arguments: dict[str, Any]  # by parameter, compile-time ones included
    metadata: Any  # Triton's, of the compiled kernel: num_warps, num_stages, …
    binary: Binary
    device: int

    @property
    def name(self) -> str:
        return self.function.fn.__name__

    @property
    def options(self) -> Any:
        """Compile-time arguments of a portable kernel."""
        return self.arguments["OPT"]

    @functools.cached_property
    def compiled(self) -> Any:
        """Triton's CompiledKernel, valid within the ``gpu`` context."""
        known = self.function.device_caches[self.device][0].values()
        return next(compiled for compiled in known if compiled.function is self.binary)


@dataclass(frozen=True, eq=False)
class Binary:
    """A loaded kernel, for which a driver would return a handle."""

    name: str
    code: bytes
    shared: int


class Launcher:
    """Replacement of Triton's compiled C launcher that checks and records launches."""

    def __init__(self, standin: StandIn, source: Any, metadata: Any) -> None:
        self.standin, self.source, self.metadata = standin, source, metadata
        standin.functions.add(source.fn)

    def __call__(self, *given: Any) -> None:
        grid, binary, arguments = given[:3], given[4], given[9:]
        if not all(1 <= size <= most for size, most in zip(grid, _LARGEST_GRID, strict=True)):
            raise LaunchError(f"{binary.name}: no driver launches a grid of {grid}")
        named = dict(zip(self.source.fn.arg_names, arguments, strict=True))
        for at, (name, value) in enumerate(named.items()):
            self._check(binary, name, value, self.source.signature[name], (at,))
        self.standin.launched.append(Launched(self.source.fn, grid, named, self.metadata, binary, self.standin.device))

    def _check(self, binary: Binary, name: str, value: Any, kind: Any, path: tuple[int, ...]) -> None:
        """Compare an argument with the type, constant and divisibility that the kernel was compiled for."""
        if isinstance(kind, tuple):
            for at, (field, own) in enumerate(zip(value, kind, strict=True)):
                self._check(binary, f"{name}[{at}]", field, own, (*path, at))
            return
        if kind == "constexpr":
            constant = self.source.constants.get(path, LaunchError)
            complaint = "" if _same(constant, value) else f"is not {constant!r}"
        elif kind.startswith("tensordesc"):
            descriptors = getattr(self.metadata, "tensordesc_meta", None) or []
            kinds = [k for k in self.source.signature.values() if isinstance(k, str) and k.startswith("tensordesc")]
            before = list(self.source.signature.values())[: path[0]]
            at = sum(k in kinds for k in before if isinstance(k, str))
            complaint = _check_descriptor(value, kind, descriptors[at] if at < len(descriptors) else None)
        else:
            divisible = ["tt.divisibility", 16] in self.source.attrs.get(path, [])
            complaint = _check_value(value, kind, divisible)
        if complaint:
            raise LaunchError(f"{binary.name}: argument {name} = {value!r:.200} {complaint}")


def _same(compiled: Any, given: Any) -> bool:
    return type(compiled) is type(given) and (compiled == given or compiled != compiled)


def _check_value(value: Any, kind: str, divisible: bool) -> str:
    if kind.startswith("*"):
        if not isinstance(value, torch.Tensor) or kind != "*" + canonicalize_dtype(value.dtype):
            return f"is no {kind}"
        return "is not aligned to 16 bytes" if divisible and value.data_ptr() % 16 else ""
    if kind[0] in "iu" and kind[1:].isdigit():
        bits = int(kind[1:])
        least, most = (-(1 << bits - 1), 1 << bits - 1) if kind[0] == "i" else (0, 1 << bits)
        if not isinstance(value, int) or not least <= value < most:
            return f"is no {kind}"
        return "is no multiple of 16" if divisible and value % 16 else ""
    return "" if isinstance(value, (int, float)) else f"is no {kind}"


def _check_descriptor(value: Any, kind: str, metadata: dict[str, Any] | None) -> str:
    """Check a tensor descriptor as ``cuTensorMapEncodeTiled`` would."""
    base, block = value.base, list(value.block_shape)
    strides = [stride * base.element_size() for stride in value.strides]
    if not kind.startswith(f"tensordesc<{canonicalize_dtype(base.dtype)}[{', '.join(map(str, block))}]"):
        return f"is no {kind}"
    if base.data_ptr() % 16 or any(stride % 16 for stride in strides[:-1]):
        return "has an address or a stride that is no multiple of 16 bytes"
    if not all(0 < stride < 2**40 for stride in strides) or not all(0 < size <= 2**32 for size in value.shape):
        return "has a stride or a size that TMA does not take"
    box = block if metadata is None else list(metadata["block_size"])
    if not all(0 < size <= _LARGEST_BOX for size in box):
        return f"has a box of {box}"
    swizzle = 0 if metadata is None else _SWIZZLES[metadata["swizzle"]]
    return f"has rows wider than its swizzle of {swizzle} bytes" if 0 < swizzle < box[-1] * base.element_size() else ""


class StandIn:
    """Triton's driver interface for one architecture: an int such as 90, or an AMD name such as "gfx942"."""

    def __init__(self, architecture: int | str, shared: int | None, needed: Callable[..., int]) -> None:
        self.architecture = architecture
        self.shared = SHARED[architecture] if shared is None else shared
        self.warp = 64 if str(architecture).startswith("gfx9") else 32
        self.needed = needed
        self.folder = tempfile.TemporaryDirectory()
        self.device = next(_devices)
        self.launched: list[Launched] = []
        self.functions: set[Any] = set()
        self.utils = self  # what Triton asks of the C module
        self.launcher_cls = functools.partial(Launcher, self)

    def load_binary(self, name: str, code: bytes, shared: int, device: int) -> tuple[Any, ...]:
        registers, spills, most_threads = 0, 0, 1024  # not read by Triton's launch path, but for the last
        return object(), Binary(name, code, shared), registers, spills, most_threads

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": self.shared, "multiprocessor_count": MULTIPROCESSORS, "warpSize": self.warp}

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("hip" if isinstance(self.architecture, str) else "cuda", self.architecture, self.warp)

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def ignore(self, _: Any) -> None:
        """Do nothing."""

    unload_module = set_current_device = ignore

    def pretend_to_compile(self, source: Any, target: GPUTarget, options: dict[str, Any]) -> Any:
        """Return a CompiledKernel without code; replaces ``triton.compiler.compile``."""
        constants = {source.fn.arg_names[at]: value for (at, *_), value in source.constants.items()}
        metadata = {"name": source.fn.__name__, "target": vars(target), "num_ctas": 1, "tmem_size": None}
        metadata |= {name: options[name] for name in ("num_warps", "num_stages")} | {"warp_size": self.warp}
        metadata |= {"shared": self.needed(source.fn.__name__, constants.get("OPT"), options)}
        path = Path(self.folder.name) / f"{next(_files)}.json"
        path.write_text(json.dumps(metadata))
        code = path.with_suffix(".hsaco" if target.backend == "hip" else ".cubin")
        code.touch()
        return compiler.CompiledKernel(source, {path.name: str(path), code.name: str(code)}, path.stem)

    def close(self) -> None:
        """Discard the kernels compiled for this stand-in."""
        for function in self.functions:
            kernels, *_ = function.device_caches.pop(self.device, ({},))
            for kernel in kernels.values():
                kernel.module = None  # Triton 3.8 unloads it with the kernel, by the driver of that time
        self.folder.cleanup()


@contextlib.contextmanager
def gpu(
    architecture: int | str = 90,
    *,
    shared: int | None = None,
    compiles: bool = True,
    needed: Callable[[str, Any, dict[str, Any]], int] = lambda kernel, options, settings: 0,
) -> Iterator[list[Launched]]:
    """Allow launches of kernels for CPU tensors, and yield the list of launches.

    architecture: compute capability as in sm_90, or AMD's name ("gfx942").
    shared: bytes of shared memory that the device reports; None for those of the architecture.
    compiles: False omits the compilation; ``needed`` then returns the bytes of shared memory of a kernel, given its
        name, compile-time options and Triton's settings.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise RuntimeError("the stand-in driver needs a process without TRITON_INTERPRET=1")
    standin = StandIn(architecture, shared, needed)
    nvidia = architecture if isinstance(architecture, int) else 0
    before = drivers._active
    drivers.set_active(standin)
    call_cache.clear()
    try:
        with (
            mock.patch.object(compiler, "compile", compiler.compile if compiles else standin.pretend_to_compile),
            mock.patch.object(backend, "_device_unavailable", return_value=None),
            mock.patch.object(kernel_args, "architecture", return_value=nvidia),
            mock.patch.object(launch_hopper, "multiprocessors", return_value=MULTIPROCESSORS),
            mock.patch.object(torch.version, "hip", torch.version.hip if nvidia else "stand-in"),
        ):
            yield standin.launched
    finally:
        drivers._active = before
        standin.close()
        call_cache.clear()
