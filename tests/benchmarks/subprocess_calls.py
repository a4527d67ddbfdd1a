"""Function that fails in various ways, called in a subprocess."""

import os
import time

FAULTS = {  # of PyTorch's calls, and of Triton's launches
    "fault": "CUDA error: an illegal memory access was encountered",
    "fault of a launch": "Triton Error [CUDA]: an illegal memory access was encountered",
}
_faulted = False


def fail(how: object) -> None:
    global _faulted
    if _faulted:
        raise RuntimeError("this process has no GPU any more")
    if how == "raise":
        raise ValueError("a reason\nand more")
    if how == "hang":
        time.sleep(60)
    if how == "die":
        os._exit(3)
    if how in FAULTS:
        _faulted = True
        raise RuntimeError(FAULTS[str(how)])
