"""Lock of a run folder, which prevents two runs from writing into the same one."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from sigattn.validation import UserError

LOCK_FILE = "run.lock"


class FolderInUseError(UserError):
    """Another process or thread is writing into the run folder; the message is one line."""


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, which is created if missing; the thread that holds it can enter again.

    The operating system releases the lock when the process ends, also if it is killed; the file ``run.lock`` remains.
    Raises FolderInUseError if another process, or another thread of this one, holds the lock.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder.resolve() / LOCK_FILE, is_singleton=True)  # one object per file, so that it can enter again
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise FolderInUseError(
            f"another process or thread is writing into the run folder {folder}: wait until it has ended, or name "
            "another folder"
        ) from error
    try:
        yield
    finally:
        lock.release()
