"""Shared sequences, in 2, 3 and 4 processes (context_worker.py), and who has which positions."""

import itertools
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from sigattn.distributed.sequence_sharding import SequenceSharding
from tests.distributed import context_worker

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")


def launch(processes, what):
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={processes}", "--standalone"]
    command += ["--monitor-interval=0.1", str(Path(context_worker.__file__)), what]
    return subprocess.run(command, capture_output=True, text=True, timeout=200)


@pytest.mark.parametrize("processes", [2, *([4] if os.environ.get("SIGATTN_SWEEP") == "all" else [])])
def test_attention(processes):
    """Every option and way, outputs, gradients and bytes sent, even shares."""
    done = launch(processes, "attention")
    assert done.returncode == 0, done.stderr[-4000:]


def test_three_processes():
    """Uneven shares, models, what is refused, and a shared cache."""
    done = launch(3, "attention,models,refused,cache")
    assert done.returncode == 0, done.stderr[-4000:]


def test_a_process_that_dies_is_missed():
    start = time.time()
    done = launch(3, "dying")
    assert time.time() - start < 60
    assert "error after" in done.stderr
    assert "nobody missed it" not in done.stderr


@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize("length", [1, 5, 12])
def test_pairs_are_those_of_which_something_is_seen(balanced, length):
    """Against every query and key: no pair is left out of which a single key is seen, and none is visited in vain."""
    for ranks in (1, 2, 3):
        sharding = SequenceSharding(length, ranks, balanced)
        for left, right in itertools.product((-1, 0, 1, 2, 4), repeat=2):
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


@pytest.mark.parametrize("balanced", [False, True])
def test_every_position_is_someones(balanced):
    for length in (1, 5, 16, 37):
        for ranks in (1, 2, 3, 4, 7):
            sharding = SequenceSharding(length, ranks, balanced)
            sizes = [sharding.size(r) for r in range(ranks)]
            everything = torch.cat([sharding.positions(r) for r in range(ranks)])
            assert sorted(everything.tolist()) == list(range(length))
            assert max(sizes) - min(sizes) <= 2
            whole = torch.arange(2 * length).view(2, length)
            for r in range(ranks):
                assert torch.equal(sharding.shard(whole, r)[0], sharding.positions(r))


def test_balanced_shares_have_the_same_to_do():
    """Pairs that a causal mask lets be seen."""
    sharding = SequenceSharding(64, 4, True)
    work = [int((sharding.positions(r) + 1).sum()) for r in range(4)]
    assert max(work) == min(work)
    plain = SequenceSharding(64, 4, False)
    assert int((plain.positions(3) + 1).sum()) > 6 * int((plain.positions(0) + 1).sum())
