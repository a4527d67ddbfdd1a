"""Candidates of ``python -m benchmarks tune``, launched over the stand-in driver without compilation."""

import torch

from benchmarks import gpu, tune
from sigattn.ops.triton import tuning
from tests.ops import standin_driver


def test_every_candidate_is_launched(monkeypatch):
    monkeypatch.setattr(gpu, "device", lambda: torch.device("cpu"))
    config = tune.TuneBenchmark(lengths=(256,), num_heads=1)
    seen, forms = set(), {tuning.FWD: "fwd", tuning.DKDV: "bwd_dkdv", tuning.DQ: "bwd_dq"}
    for case in (tune.Case(256, d, causal, k) for d, causal in ((64, True), (128, False)) for k in tune.PASSES):
        with standin_driver.gpu(90, compiles=False) as launched:
            for candidate in tune.candidates_of(config, case):
                before = len(launched)
                tune.try_once((config, case, candidate))
                prefix = "hopper_" if isinstance(candidate, tuning.HopperConfig) else ""
                assert {x.name for x in launched[before:]} == {f"{prefix}{forms[case.kernel]}_kernel"}, (
                    case,
                    candidate,
                )
                seen.add((case.kernel, prefix))
    assert len(seen) == 6
