"""Worker processes for parallel training runs, which end with the process that started them."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

from sigattn.train.loop import Interrupted

T = TypeVar("T")


def pool(workers: int) -> ProcessPoolExecutor:
    """Return a pool of spawned processes that end when this process ends, even if it is killed."""
    return ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"), initializer=_watch_parent)


def train_in_worker(function: Callable[..., T], *args: object) -> T:
    """Call a function that trains; after SIGINT or SIGTERM and the checkpoint, end the worker process.

    An exception would return to the pool, which would start the next job in this worker.
    """
    try:
        return function(*args)
    except Interrupted as stop:
        os._exit(128 + stop.signal)


def _watch_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
