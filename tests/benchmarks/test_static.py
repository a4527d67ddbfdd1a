"""What the analysis of machine code reads out of the compiler's output; tests/ops/compiled compiles the kernels."""

import importlib.util

import pytest

from benchmarks import compiled_kernel, machine_code, static_hopper

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def test_programs_on_a_multiprocessor():
    """Limited by registers, shared memory or warps, as in NVIDIA's occupancy calculator."""
    registers = [(90, 128, 8, 80, 2), (90, 129, 8, 80, 1), (90, 159, 4, 73, 3)]
    memory_or_warps = [(90, 64, 4, 113, 2), (90, 64, 4, 114, 1), (86, 32, 4, 4, 12), (75, 32, 4, 4, None)]
    for *case, kib, expected in [*registers, *memory_or_warps]:
        assert compiled_kernel.programs(*case, kib * 1024) == expected


def test_which_advisories_say_that_products_are_serialised():
    injected = "ptxas info : (C7519) warpgroup.arrive is injected in around line 3187 by compiler"
    serialised = "ptxas info : (C7515) Potential Performance Loss: wgmma.mma_async instructions are serialized"
    assert machine_code.advisories(f"{injected}\n{serialised}\nptxas info : Used 128 registers") == [serialised]


def test_missing_fences_are_found():
    whole = ["stmatrix.sync", "fence.proxy.async.shared::cta;", "bar.sync 2, 128;", "mbarrier.arrive.shared::cta.b64"]
    assert static_hopper.missing_fence("\n".join(whole)) == ""
    for missing in (1, 2):
        assert "mbarrier" in static_hopper.missing_fence("\n".join(whole[:missing] + whole[missing + 1 :]))
    swapped = [whole[0], whole[2], whole[1], whole[3]]
    assert "mbarrier" in static_hopper.missing_fence("\n".join(swapped))
