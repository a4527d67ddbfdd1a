"""Threads that run a kernel: those of PyTorch's OpenMP, or Python's if its runtime has no entry point of GNU's.

PyTorch's wheels for Linux and macOS carry a runtime with ``GOMP_parallel``, those for Windows do not. Kernels take
tasks from a counter, so that any number of threads may run one. Only Linux has been tried.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

_KERNEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p)  # its calls release Python's lock


def parallel() -> Any:
    """Return the function that runs a kernel: of its address, that of its arguments, the number of threads, and 0."""
    paths = [] if sys.platform == "win32" else [None, str(Path(torch.__file__).parent / "lib" / "libomp.dylib")]
    for path in paths:
        try:
            function = ctypes.CDLL(path).GOMP_parallel
        except (OSError, AttributeError):
            continue
        function.restype, function.argtypes = None, (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        return function
    return on_python_threads


def on_python_threads(kernel: int, arguments: int, threads: int, _flags: int) -> None:
    """Run a kernel on this thread and others of a pool, arguments as of ``GOMP_parallel``."""
    run = _KERNEL(kernel)
    others = [_pool(os.getpid()).submit(run, arguments) for _ in range(threads - 1)]
    run(arguments)
    for other in others:
        if not other.cancel():  # one that has not begun would find no task left
            other.result()


@functools.cache
def _pool(_process: int) -> ThreadPoolExecutor:
    """Return the pool of a process; a child has none of the threads of its parent."""
    return ThreadPoolExecutor(os.cpu_count(), "sigattn")
