"""Processes for training runs side by side, which end with the process that started them."""

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
    """Fresh processes, none of which outlives this one, however it ends."""
    return ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"), initializer=_watch_parent)


def until_stopped(function: Callable[..., T], *args: object) -> T:
    """Call a function that trains; on SIGINT or SIGTERM end the worker, once the checkpoint is written.

    An exception would let the worker take the next job.
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
