"""Context parallelism on 2, 3 and 4 processes (context_worker.py), and the sharding of positions."""

import itertools
import os
import re
import runpy
from pathlib import Path

import pytest
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from sigattn.distributed.sequence_sharding import SequenceSharding
from tests.distributed import context_worker
from tests.distributed.processes import launch

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")


@pytest.mark.parametrize("processes", [3, *([2, 4] if os.environ.get("SIGATTN_SWEEP") == "all" else [])])
def test_several_processes(processes, tmp_path):
    """Every option: outputs and gradients; models, a sharded cache, errors, a dead process."""
    said, codes = launch(processes, tmp_path, context_worker.main)
    assert all("compared" in text for text in said), said
    assert sorted(codes) == [0] + [7] * (processes - 1), said  # the one that dies, and those that notice
    assert max(float(re.search(r"error after ([\d.]+) s", text)[1]) for text in said if "error after" in text) < 60


def test_the_example(tmp_path):
    """It compares with one process itself, and fails if it differs."""
    script = str(Path(__file__).parents[2] / "examples" / "context_parallel.py")
    said, codes = launch(2, tmp_path, runpy.run_path, script, None, "__main__")
    assert codes == [0, 0], said


def test_one_process():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        context_worker.check(init_device_mesh("cpu", (1,)), {"is_causal": True, "n": 6})
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize("length", [1, 5, 12])
def test_visible_pairs(balanced, length):
    """The visible pairs are exactly those with a visible key, compared with every query and key."""
    for ranks in (1, 3):
        sharding = SequenceSharding(length, ranks, balanced)
        for left, right in itertools.product((-1, 0, 1, 4), repeat=2):
            for queries, keys in itertools.product(range(ranks), repeat=2):
                found = {(q, k) for _, _, q, k in sharding.visible_pairs(queries, keys, left, right)}
                expected = {
                    (q, k)
                    for q in sharding.segments(queries)
                    for k in sharding.segments(keys)
                    if any((right < 0 or j <= i + right) and (left < 0 or j >= i - left) for i in q for j in k)
                }
                assert found == expected, (ranks, left, right)
                for rows, columns, q, k in sharding.visible_pairs(queries, keys, left, right):
                    assert torch.equal(sharding.positions(queries)[rows], torch.arange(q.start, q.stop))
                    assert torch.equal(sharding.positions(keys)[columns], torch.arange(k.start, k.stop))


def test_balanced_sharding_balances_causal_work():
    sharding = SequenceSharding(64, 4, True)
    assert len({int((sharding.positions(r) + 1).sum()) for r in range(4)}) == 1
