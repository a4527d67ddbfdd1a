"""Deferred handling of SIGINT (Ctrl-C) and SIGTERM, so that a step is always completed."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class StopRequest:
    """Context manager in which SIGINT and SIGTERM only set ``signal``, the signal's number (0 before any).

    A second SIGINT raises KeyboardInterrupt at once. A second SIGTERM is ignored, because schedulers and torchrun may
    both send one; they send SIGKILL when their grace period ends.

    Outside the main thread, where Python does not allow signal handlers, the context does nothing.
    """

    def __init__(self) -> None:
        self.signal: int = 0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._previous = {n: signal.signal(n, self._on_signal) for n in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            # None: the handler was not installed from Python and cannot be restored
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self.signal and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = self.signal or int(number)
