"""Calls that may hang or take their process with them, tried in processes of their own, several at a time.

A kernel that has never run may do both: after a fault a CUDA context is of no use, and a kernel that waits for ever
cannot be stopped from within. What comes out alive has also left its machine code in the compiler's cache.
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
    """Call a function with each thing of each group, and say which calls did not work.

    Args:
        function: "module:name" of what takes one thing.
        groups: a group's things are tried one after another, in one process while that lives; groups side by side.
        seconds: how long one call may take.
        workers: how many processes at a time; None is one for each processor.
        chunk: of a group, how many things are tried one after another, and the next as many beside them; None is all.

    Returns:
        For each group, the places of what failed, with the reason.
    """
    parts = [
        (key, first, list(things[first : first + (chunk or len(things))]))
        for key, things in groups.items()
        for first in range(0, len(things), chunk or max(1, len(things)))
    ]
    failed: dict[Key, dict[int, str]] = {key: {} for key in groups}
    stop = threading.Event()
    with ThreadPoolExecutor(workers or os.cpu_count() or 1) as pool:
        found = pool.map(lambda part: _group(function, part[2], seconds, stop), parts)
        try:
            for (key, first, _), reasons in zip(parts, found, strict=True):
                failed[key] |= {first + at: reason for at, reason in reasons.items()}
        except KeyboardInterrupt:  # the processes got the signal too; no other is to be started
            stop.set()
            raise
    return failed


def _group(function: str, things: list[Any], seconds: int, stop: threading.Event) -> dict[int, str]:
    failed: dict[int, str] = {}
    first = 0
    while first < len(things) and not stop.is_set():
        done = subprocess.run(
            [sys.executable, "-m", "sigattn.bench.subprocesses"],
            input=pickle.dumps((function, things[first:], seconds)),
            capture_output=True,
        )
        if done.returncode == -signal.SIGINT:  # so did this process
            stop.set()
        said = [x[len(_DONE) :] for x in done.stdout.decode(errors="replace").splitlines() if x.startswith(_DONE)]
        failed |= {first + at: reason for at, reason in enumerate(said) if reason}
        first += len(said)
        if first < len(things) and not (said and said[-1]):  # it died in the middle of this one
            failed[first] = _reason(done, seconds)
            first += 1
    return failed


def _reason(done: subprocess.CompletedProcess[bytes], seconds: int) -> str:
    if done.returncode == -signal.SIGALRM:
        return f"no end after {seconds} s"
    last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
    return f"its process ended with {done.returncode}: {' '.join(last)}"[:200]


def main() -> None:
    """The process: reads what to do, says a line for each call, and ends early if the GPU is of no use any more."""
    function, things, seconds = pickle.loads(sys.stdin.buffer.read())
    module, _, name = function.partition(":")
    call = getattr(importlib.import_module(module), name)
    for thing in things:
        reason = ""
        signal.alarm(seconds)  # its default is to end the process, wherever it hangs
        try:
            call(thing)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        signal.alarm(0)
        print(_DONE + reason, flush=True)
        if "CUDA error" in reason or "AcceleratorError" in reason:
            sys.exit(1)


if __name__ == "__main__":
    main()
