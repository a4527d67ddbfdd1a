"""Candidates of ``python -m benchmarks tune``, launched over the stand-in driver without compilation."""

import torch

from benchmarks import gpu, tune
from sigattn.ops.triton import tuning
from tests.ops import standin_driver

KERNELS = {  # launched for a candidate of each kernel
    tuning.FWD: {"fwd_kernel", "hopper_fwd_kernel"},
    tuning.DKDV: {"bwd_dkdv_kernel", "hopper_bwd_dkdv_kernel"},
    tuning.DQ: {"bwd_dq_kernel", "hopper_bwd_dq_kernel"},
}


def test_every_candidate_is_launched(monkeypatch):
    monkeypatch.setattr(gpu, "device", lambda: torch.device("cpu"))
    config = tune.TuneBenchmark(lengths=(256,), num_heads=1)
    seen = set()
    for case in (tune.Case(256, d, causal, k) for d, causal in ((64, True), (128, False)) for k in tune.PASSES):
        with standin_driver.gpu(90, compiles=False) as launched:
            for candidate in tune.candidates_of(config, case):
                before = len(launched)
                tune.try_once((config, case, candidate))
                names = {x.name for x in launched[before:]}
                assert names, (case, candidate)
                assert names <= KERNELS[case.kernel], (case, candidate)
                hopper = isinstance(candidate, tuning.HopperConfig)
                assert all(name.startswith("hopper") == hopper for name in names), (case, candidate, names)
                seen |= names
    assert seen == set().union(*KERNELS.values())
