"""Training on 2 and 4 processes gives the results of one process, and resumes with another number of processes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sigattn.models.saving import load
from sigattn.train import metrics
from tests.distributed import worker

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")

PARALLELISM = {
    "ddp": {"parallel": "ddp"},
    "fsdp": {"parallel": "fsdp"},
    "accumulated": {"parallel": "ddp", "grad_accum_steps": 2},
    "accumulated-fsdp": {"parallel": "fsdp", "grad_accum_steps": 2},
    "tensor": {"tensor_parallel": 2},
    "context": {"context_parallel": 2},
    "context-fsdp": {"context_parallel": 2, "parallel": "fsdp", "context_strategy": "gather"},
}


def launch(processes, jobs):
    """Run the jobs under torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={processes}", "--standalone"]
    command += [str(Path(worker.__file__)), json.dumps(jobs)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]


def rows(folder):
    return metrics.read_metrics(Path(folder) / "metrics.jsonl")


def same(folder, other, tolerance=2e-4):
    ours, theirs = rows(folder), rows(other)
    assert len(ours) == len(theirs) == 5
    for a, b in zip(ours, theirs, strict=True):
        assert a.keys() == b.keys()
        for name in a.keys() - {"samples_per_second"}:
            assert a[name] == pytest.approx(b[name], rel=tolerance), (a["step"], name)
    ours, theirs = (load(Path(f) / "model").state_dict() for f in (folder, other))
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=5e-3, atol=5e-4, msg=lambda m, n=name: f"{n}: {m}")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Train all runs of 1, 2 and 4 processes, in as few launches as possible."""
    root = tmp_path_factory.mktemp("runs")

    def job(name, kind="language", **more):
        return {"folder": str(root / name), "kind": kind, **more}

    closely = {"statistics_every": 2, "batch_size": 7}
    worker.run([job("one-closely", training=closely)])
    worker.run(
        [job(f"one-{kind}", kind) for kind in ("language", "documents", "rope", "vision", "contrast", "teacher")]
    )
    shared = [job(f"2-{way}", training=training) for way, training in PARALLELISM.items()]
    shared += [job("2-rope-tensor", "rope", training={"tensor_parallel": 2})]
    again = {"context_parallel": 2, "grad_accum_steps": 2, "checkpoint_activations": True}
    shared += [job("2-rope-context", "rope", training=again)]
    shared += [job("2-closely", training={**closely, "parallel": "fsdp", "grad_accum_steps": 2})]
    shared += [job("2-vision-context", "vision", training={"context_parallel": 2})]
    shared += [job("2-vision-fsdp", "vision", training={"parallel": "fsdp"})]
    shared += [
        job("2-placeholder", "placeholder"),
        job("2-placeholder-fsdp", "placeholder", training=PARALLELISM["accumulated-fsdp"]),
    ]
    shared += [job("2-documents", "documents")]
    shared += [job("2-contrast", "contrast"), job("2-teacher", "teacher")]
    shared += [job(f"2-{k}-fsdp", k, training={"parallel": "fsdp"}) for k in ("contrast", "teacher")]
    half = {"parallel": "fsdp", "precision": "bfloat16"}
    shared += [job("2-half-vision", "vision", training=half), job("2-half-rope", "rope", training=half)]
    bias = {"attention_bias": -4.015625}  # halfway between two numbers of bfloat16, 1.6 % of each weight away
    probed = {"precision": "bfloat16", "statistics_every": 1}
    shared += [job(f"2-half-bias-{n}", training={**probed, "parallel": n}, model=bias) for n in ("ddp", "fsdp")]
    shared += [job("2-half-query", training=half, model={"learn_bias": "query", "attention_bias": -5.0})]
    shared += [job(f"2-average-{n}", training={**PARALLELISM[n], "ema": 0.9}) for n in ("fsdp", "tensor")]
    shared += [job("2-odd", training={"tensor_parallel": 2}, model={"mlp_dim": 33})]
    shared += [job("2-one-key-head", training={"tensor_parallel": 2}, model={"num_kv_heads": 1})]
    shared += [
        job("2-few", training={"batch_size": 1}),
        job("2-contrast-tensor", "contrast", training={"tensor_parallel": 2}),
    ]
    launch(2, [*shared, job("resumed", stop_after=1)])
    mixed = {"tensor_parallel": 2, "parallel": "fsdp"}
    four = [job("4-ddp", training=PARALLELISM["ddp"])]
    four += [job("4-mixed", training=mixed), job("4-uneven", training={"tensor_parallel": 3})]
    four += [job("4-context", training={"context_parallel": 2, "parallel": "fsdp"})]
    four += [job("4-context-tensor", training={"context_parallel": 2, "tensor_parallel": 2})]
    four += [job("resumed", resume=True, stop_after=3, training={"parallel": "fsdp"})]
    launch(4, four)
    worker.run([job("resumed", resume=True)])
    return root


@pytest.mark.parametrize("way", PARALLELISM)
def test_two_processes(runs, way):
    same(runs / f"2-{way}", runs / "one-language")


@pytest.mark.parametrize("run", ["placeholder", "placeholder-fsdp"])
def test_process_without_samples_does_not_count(runs, run):
    same(runs / f"2-{run}", runs / "one-language")


def test_processes_are_weighted_by_their_targets(runs):
    same(runs / "2-documents", runs / "one-documents")


@pytest.mark.parametrize("way", ["tensor", "context"])
def test_rope_and_hybrid_norm(runs, way):
    same(runs / f"2-rope-{way}", runs / "one-rope")


def test_vision_transformer(runs):
    same(runs / "2-vision-fsdp", runs / "one-vision")


@pytest.mark.parametrize("run", ["contrast", "contrast-fsdp", "teacher", "teacher-fsdp"])
def test_contrastive_losses_use_samples_of_all_processes(runs, run):
    """InfoNCE over the gathered batch, and batch norm over all samples, with their gradients; and BYOL's teacher."""
    same(runs / f"2-{run}", runs / f"one-{run.removesuffix('-fsdp')}")


def test_statistics_of_all_processes(runs):
    same(runs / "2-closely", runs / "one-closely")
    assert "row_mass" in rows(runs / "2-closely")[2]


@pytest.mark.parametrize("kind", ["vision", "rope"])
def test_half_precision_is_close(runs, kind):
    """Weights gathered in bfloat16, gradients added in float32."""
    for a, b in zip(rows(runs / f"2-half-{kind}"), rows(runs / f"one-{kind}"), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=0.02)
        assert a["gradient_norm"] == pytest.approx(b["gradient_norm"], rel=0.1)
    assert rows(runs / f"2-half-{kind}")[0]["loss"] != rows(runs / f"one-{kind}")[0]["loss"]


def test_biases_keep_their_precision(runs):
    """The mass of a row of weights is proportional to exp(b)."""
    replicated, sharded = (rows(runs / f"2-half-bias-{n}")[0]["row_mass"] for n in ("ddp", "fsdp"))
    assert sharded == pytest.approx(replicated, rel=2e-3)
    assert len(rows(runs / "2-half-query")) == 5  # the layer's bias that is no bias of logits


@pytest.mark.parametrize("way", ["ddp", "mixed", "context", "context-tensor"])
def test_four_processes(runs, way):
    same(runs / f"4-{way}", runs / "one-language")


def test_resume_with_another_number_of_processes(runs):
    same(runs / "resumed", runs / "one-language")


def test_unsupported_context_parallelism_raises(runs):
    message = "context_parallel supports language models with sigmoid attention only, got ViTConfig("
    assert message in (runs / "2-vision-context" / "error").read_text()


def test_unsupported_tensor_parallelism_raises(runs):
    assert "tensor_parallel=3 does not divide the 4 processes" in (runs / "4-uneven" / "error").read_text()
    assert "SimCLR does not support tensor_parallel=2" in (runs / "2-contrast-tensor" / "error").read_text()
    for name in ("2-average-fsdp", "2-average-tensor"):
        assert 'needs the whole weights on each process: set parallel="ddp"' in (runs / name / "error").read_text()
    for name, reason in (("2-odd", "33 hidden features do"), ("2-one-key-head", "4 heads and 1 key heads do")):
        assert f"tensor_parallel=2 is not possible: {reason}" in (runs / name / "error").read_text()


def test_fewer_samples_than_processes_raise(runs):
    assert "batch_size=1 leaves some of the 2 processes without a sample" in (runs / "2-few" / "error").read_text()
