"""Calls that hang, raise or crash their subprocess."""

from benchmarks import subprocesses


def test_each_failure_affects_one_call():
    groups = {
        "fine": [1, 2],
        "raises": ["raise", 1, "raise"],
        "hangs": [1, "hang", 2],
        "dies": ["die", 1],
        "faults": [1, "fault", 2, "fault of a launch", 3],
        "nothing": [],
    }
    found = subprocesses.find_failures("tests.benchmarks.subprocess_calls:fail", groups, seconds=2, workers=3)
    assert found["fine"] == found["nothing"] == {}
    assert found["raises"] == {0: "ValueError: a reason", 2: "ValueError: a reason"}
    assert found["hangs"] == {1: "no end after 2 s"}
    assert list(found["dies"]) == [0]
    assert "ended with 3" in found["dies"][0]
    assert list(found["faults"]) == [1, 3]
    assert "illegal memory access" in found["faults"][1]


def test_missing_module():
    found = subprocesses.find_failures("tests.benchmarks.no_such_module:fail", {"a": [1, 2]})["a"]
    assert list(found) == [0, 1]
    assert "no_such_module" in found[0]
