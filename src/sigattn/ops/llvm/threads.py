"""Threads that run a kernel: those of PyTorch's OpenMP."""

from __future__ import annotations

import ctypes
import functools
import sys
from pathlib import Path
from typing import Any

import torch


@functools.cache
def parallel() -> Any:
    """Return the function that runs a kernel: of its address, that of its arguments, the number of threads, and 0.

    It is GNU's entry point, which the runtimes of PyTorch's wheels for Linux and macOS have, and that for Windows has
    not; then None. Only Linux has been tried.
    """
    paths = [] if sys.platform == "win32" else [None, str(Path(torch.__file__).parent / "lib" / "libomp.dylib")]
    for path in paths:
        try:
            function = ctypes.CDLL(path).GOMP_parallel
        except (OSError, AttributeError):
            continue
        function.restype, function.argtypes = None, (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        return function
    return None
