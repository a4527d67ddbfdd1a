"""Lock of a run folder, which prevents two runs from writing into the same one."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from sigattn.distributed.process_mesh import ProcessMesh
from sigattn.validation import UserError

LOCK_FILE = "run.lock"


class FolderInUseError(UserError):
    """Another process or thread is writing into the run folder; the message is one line."""


@contextmanager
def lock_folder(folder: Path, processes: ProcessMesh | None = None) -> Iterator[None]:
    """Hold the lock of a folder, which is created if missing; the thread that holds it can enter again.

    The operating system releases the lock when the process ends, also if it is killed; the file ``run.lock`` remains.
    Raises FolderInUseError if another process, or another thread of this one, holds the lock. Of several ``processes``
    the main one holds it; if that fails, all of them raise.
    """
    processes = processes or ProcessMesh()
    error: Exception | None = None
    with ExitStack() as stack:
        if processes.is_main_process:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                lock = FileLock(folder.resolve() / LOCK_FILE, is_singleton=True)  # one object, which can enter again
                stack.enter_context(lock.acquire(timeout=0))
            except Timeout:
                error = FolderInUseError(
                    f"another process or thread is writing into the run folder {folder}: wait until it has ended, or "
                    "name another folder"
                )
            except OSError as caught:
                error = caught
        if processes.reduce_max(error is not None):
            raise error or FolderInUseError(f"the main process cannot write into the run folder {folder}")
        yield
