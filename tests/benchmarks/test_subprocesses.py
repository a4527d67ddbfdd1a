"""Calls that hang, raise or crash their subprocess."""

import os
import time

from benchmarks import subprocesses

FAULTS = {  # of PyTorch's calls, and of Triton's launches
    "fault": "CUDA error: an illegal memory access was encountered",
    "fault of a launch": "Triton Error [CUDA]: an illegal memory access was encountered",
}
_faulted = False


def fail(how: object) -> None:
    """Fail as named; after a fault, every call of the process fails."""
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


def test_each_failure_affects_one_call():
    groups = {
        "raises": ["raise", 1, "raise"],
        "hangs and dies": [1, "hang", "die", 2],
        "faults": [1, "fault", 2, "fault of a launch", 3],
        "nothing": [],
    }
    failed = subprocesses.find_failures(f"{__name__}:fail", groups, seconds=2, workers=3)
    assert failed["raises"] == {0: "ValueError: a reason", 2: "ValueError: a reason"}
    assert failed["hangs and dies"].keys() == {1, 2}
    assert failed["hangs and dies"][1] == "no end after 2 s"
    assert "ended with 3" in failed["hangs and dies"][2]
    assert failed["faults"].keys() == {1, 3}
    assert "illegal memory access" in failed["faults"][1]
    assert failed["nothing"] == {}
