"""Function that fails in various ways, called in a subprocess."""

import os
import time


def fail(how: object) -> None:
    if how == "raise":
        raise ValueError("a reason\nand more")
    if how == "hang":
        time.sleep(60)
    if how == "die":
        os._exit(3)
    if how == "fault":
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
