"""Calls in subprocesses, for kernels that may hang or crash their process.

After a fault a CUDA context is unusable, and a kernel that never ends cannot be stopped from within its process. The
machine code of the kernels that work remains in the compiler's cache.
"""

from __future__ import annotations

import importlib
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

Key = TypeVar("Key", bound=Hashable)
_DONE = "sigattn call: "


def find_failures(
    function: str,
    groups: Mapping[Key, Sequence[Any]],
    *,
    seconds: int = 30,
    workers: int | None = None,
    chunk: int | None = None,
) -> dict[Key, dict[int, str]]:
    """Call a function with each argument of each group, in subprocesses; return the calls that failed.

    Args:
        function: "module:name" of a function of one argument, which is pickled.
        groups: the arguments of a group are processed in sequence, in one process as long as it lives; groups run in
            parallel.
        seconds: time limit of one call.
        workers: number of processes; None is one for each processor.
        chunk: split groups into parts of this size, which run in parallel; None does not split.

    Returns:
        For each group, the indices of the arguments that failed, with the reason.
    """
    parts = [
        (key, first, list(arguments[first : first + (chunk or len(arguments))]))
        for key, arguments in groups.items()
        for first in range(0, len(arguments), chunk or max(1, len(arguments)))
    ]
    failed: dict[Key, dict[int, str]] = {key: {} for key in groups}
    stop = threading.Event()
    with ThreadPoolExecutor(workers or os.cpu_count() or 1) as pool:
        found = pool.map(lambda part: _call_each(function, part[2], seconds, stop), parts)
        try:
            for (key, first, _), reasons in zip(parts, found, strict=True):
                failed[key] |= {first + at: reason for at, reason in reasons.items()}
        except KeyboardInterrupt:  # the subprocesses received the signal too; do not start further ones
            stop.set()
            raise
    return failed


def _call_each(function: str, arguments: list[Any], seconds: int, stop: threading.Event) -> dict[int, str]:
    failed: dict[int, str] = {}
    first = 0
    while first < len(arguments) and not stop.is_set():
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.subprocesses"],
            input=pickle.dumps((function, arguments[first:], seconds)),
            capture_output=True,
        )
        if done.returncode == -signal.SIGINT:  # sent to this process as well
            stop.set()
        lines = done.stdout.decode(errors="replace").splitlines()
        reasons = [line[len(_DONE) :] for line in lines if line.startswith(_DONE)]
        failed |= {first + at: reason for at, reason in enumerate(reasons) if reason}
        first += len(reasons)
        if first < len(arguments) and not (reasons and reasons[-1]):  # the process died during this call
            failed[first] = _death_reason(done, seconds)
            first += 1
    return failed


def _death_reason(done: subprocess.CompletedProcess[bytes], seconds: int) -> str:
    if done.returncode == -signal.SIGALRM:
        return f"no end after {seconds} s"
    last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
    return f"its process ended with {done.returncode}: {' '.join(last)}"[:200]


def is_gpu_fault(reason: str) -> bool:
    """Return True if an exception's text is of PyTorch's or Triton's errors after which a process's GPU is unusable."""
    return any(sign in reason for sign in ("CUDA error", "AcceleratorError", "Triton Error ["))


def main() -> None:
    """Read a task from stdin, print a line for each call, and exit early if the GPU has become unusable."""
    function, arguments, seconds = pickle.loads(sys.stdin.buffer.read())
    module, _, name = function.partition(":")
    call = getattr(importlib.import_module(module), name)
    for argument in arguments:
        reason = ""
        signal.alarm(seconds)  # without a handler it ends the process, wherever it hangs
        try:
            call(argument)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        signal.alarm(0)
        print(_DONE + reason, flush=True)
        if is_gpu_fault(reason):
            sys.exit(1)


if __name__ == "__main__":
    main()
