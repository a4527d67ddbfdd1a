"""Lock of a run folder, which prevents two runs from writing into the same one."""

from __future__ import annotations

import errno
import json
import os
import platform
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

fcntl: Any
try:
    import fcntl
except ModuleNotFoundError:  # Windows
    fcntl = None

LOCK_FILE = "run.lock"

_held: dict[Path, tuple[int, int]] = {}  # process and thread that hold a folder


class FolderInUseError(Exception):
    """Another process or thread is writing into the run folder; the message is one line."""


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, which is created if missing; the thread that holds it can enter again.

    The operating system releases the lock when the process ends, also if it is killed; its file ``run.lock`` then
    remains.

    Raises:
        FolderInUseError: if another process, or another thread of this one, holds the lock.
    """
    folder.mkdir(parents=True, exist_ok=True)
    key, own = folder.resolve(), (os.getpid(), threading.get_ident())
    holder = _held.get(key)
    if holder == own:
        yield
        return
    if holder is not None and holder[0] == own[0]:
        raise FolderInUseError(f"another thread of this process is writing into the run folder {folder}")
    with _open_locked(folder) as file:
        _held[key] = own
        try:
            file.truncate(0)
            file.write(json.dumps({"process": own[0], "machine": platform.node()}))
            file.flush()
            yield
        finally:
            file.truncate(0)
            with suppress(OSError):  # Windows deletes no open files
                (folder / LOCK_FILE).unlink()
            del _held[key]


def _open_locked(folder: Path) -> TextIO:
    """Open and lock the lock file, again if its holder deleted it between the two."""
    path = folder / LOCK_FILE
    while True:
        file = path.open("a+")
        try:
            _acquire(file, folder)
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        except FileNotFoundError:
            pass
        except BaseException:
            file.close()
            raise
        file.close()


def _acquire(file: Any, folder: Path) -> None:
    """Lock an open file for this process; child processes do not inherit the lock."""
    if fcntl is None:
        warnings.warn(f"this system has no fcntl: a second run in {folder} is not detected", stacklevel=5)
        return
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            warnings.warn(f"cannot lock {folder} ({error}): a second run in it is not detected", stacklevel=5)
            return
        raise FolderInUseError(
            f"{_holder(file)} is writing into the run folder {folder}: wait until it has ended, or name another folder"
        ) from error


def _holder(file: Any) -> str:
    file.seek(0)
    try:
        holder = json.loads(file.read())
        return f"process {holder['process']} on {holder['machine']}"
    except (ValueError, KeyError, TypeError):
        return "another process"
