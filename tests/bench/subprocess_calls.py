"""What a trial may meet; called in a process of its own."""

import os
import time


def act(what: object) -> None:
    if what == "raise":
        raise ValueError("a reason\nand more")
    if what == "hang":
        time.sleep(60)
    if what == "die":
        os._exit(3)
    if what == "fault":
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
