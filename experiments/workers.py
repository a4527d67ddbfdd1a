"""Worker processes for parallel training runs, which end with the process that started them."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from sigattn.train.loop import Interrupted

K = TypeVar("K")
T = TypeVar("T")


def worker_pool(workers: int) -> ProcessPoolExecutor:
    """Return a pool of spawned processes that end when this process ends, even if it is killed."""
    return ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"), initializer=_watch_parent)


def run_in_workers(calls: Mapping[K, Callable[[], T]], workers: int) -> Iterator[tuple[K, T]]:
    """Call functions that train in parallel; iterate over their keys and results as they complete.

    An error, or SIGINT, ends the other workers after their step, with a checkpoint.

    Raises:
        MemoryError: if a worker was interrupted, or killed as systems do when memory runs out.
    """
    others = set(multiprocessing.active_children())
    with worker_pool(max(1, min(workers, len(calls)))) as pool:
        futures = {pool.submit(train_in_worker, call): key for key, call in calls.items()}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BaseException as error:
            for future in futures:
                future.cancel()
            for process in (
                set(multiprocessing.active_children()) - others
            ):  # the pool would wait for the end of their training
                process.terminate()
            if isinstance(error, BrokenProcessPool):
                raise MemoryError("a worker process was interrupted, or killed for want of memory") from error
            raise


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
