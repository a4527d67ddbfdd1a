"""Training on 2 and 4 processes gives the results of one process, and resumes with another number of processes."""

import signal
from pathlib import Path

import pytest
import torch

from sigattn.models.saving import load
from sigattn.train import checkpoint, metrics
from sigattn.train.folder_lock import lock_folder
from tests.distributed import worker
from tests.distributed.processes import launch

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")


CLOSELY = {"statistics_every": 2, "batch_size": 7}  # 2 does not divide 7
REFUSED = {  # name: task, settings of the training and of the model, message
    "2-vision-context": (
        "vision", {"context_parallel": 2}, {},
        "context_parallel supports language models with sigmoid attention only, got ViTConfig(",
    ),
    "2-average-fsdp": ("language", {"parallel": "fsdp", "ema": 0.9}, {}, "needs the whole weights on each"),
    "2-odd": ("language", {"tensor_parallel": 2}, {"mlp_dim": 33}, "=2 is not possible: 33 hidden features do"),
    "2-one-key-head": ("language", {"tensor_parallel": 2}, {"num_kv_heads": 1}, "4 heads and 1 key heads do"),
    "2-contrast-tensor": ("contrast", {"tensor_parallel": 2}, {}, "SimCLR does not support tensor_parallel=2"),
    "2-few": ("language", {"batch_size": 1}, {}, "batch_size=1 leaves some of the 2 processes without a sample"),
    "4-uneven": ("language", {"tensor_parallel": 3}, {}, "tensor_parallel=3 does not divide the 4 processes"),
}  # fmt: skip


def rows(folder):
    return metrics.read_metrics(Path(folder) / "metrics.jsonl")


def same(folder, other, tolerance=2e-4):
    ours, theirs = rows(folder), rows(other)
    assert len(ours) == worker.STEPS
    for row in (*ours, *theirs):
        row.pop("samples_per_second")
    assert ours == [pytest.approx(row, rel=tolerance) for row in theirs]
    states = (dict(load(Path(f) / "model").state_dict()) for f in (folder, other))
    torch.testing.assert_close(*states, rtol=5e-3, atol=5e-4)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Train all runs of 1, 2 and 4 processes, in as few launches as possible."""
    root = tmp_path_factory.mktemp("runs")

    def train(processes, jobs):
        said, codes = launch(processes, root, worker.run, jobs)
        assert codes == [0] * processes, said

    def job(name, kind="language", **more):
        return {"folder": str(root / name), "kind": kind, **more}

    def refused(processes):
        cases = ((name, case) for name, case in REFUSED.items() if name.startswith(processes))
        return [job(name, kind, training=training, model=model) for name, (kind, training, model, _) in cases]

    worker.run([job("one-closely", training=CLOSELY)])
    worker.run([job(f"one-{kind}", kind) for kind in ("language", "documents", "rope", "contrast", "teacher")])
    fsdp, accumulated = {"parallel": "fsdp"}, {"parallel": "ddp", "grad_accum_steps": 2}
    probed = {"precision": "bfloat16", "statistics_every": 1}
    bias = {"attention_bias": -4.015625}  # halfway between two numbers of bfloat16, 1.6 % of each weight away
    query = {"learn_bias": "query", "attention_bias": -5.0}
    recomputed = {"context_parallel": 2, "grad_accum_steps": 2, "checkpoint_activations": True}
    two = [
        job("2-rope-context", "rope", training=recomputed),
        job("2-closely", training={**CLOSELY, **accumulated}),
        job("2-placeholder", "placeholder", training={**accumulated, **fsdp}),
        job("2-documents", "documents"),
        job("2-contrast", "contrast"),
        job("2-teacher", "teacher", training=fsdp),
        job("2-half-bias-ddp", training={**probed, "parallel": "ddp"}, model=bias),
        job("2-half-bias-fsdp", training={**probed, **fsdp}, model=bias),
        job("2-half-query", training={**fsdp, "precision": "bfloat16"}, model=query),
        *refused("2-"),
        job("in-use"),
        job("stopped", terminate=[1, 1], training=fsdp),
        job("resumed", stop_after=0),
    ]
    with lock_folder(root / "in-use"):
        train(2, two)
    four = [
        job("4-mixed", "rope", training={"tensor_parallel": 2, **fsdp}),
        job("4-context", training={"context_parallel": 2, **fsdp}),
        job("4-context-tensor", training={"context_parallel": 2, "tensor_parallel": 2}),
        *refused("4-"),
        job("resumed", resume=True, stop_after=1, training=fsdp),
    ]
    train(4, four)
    return root


@pytest.mark.parametrize(
    ("run", "whole"),
    [
        ("2-rope-context", "rope"),
        ("2-closely", "closely"),  # with statistics
        ("2-placeholder", "language"),  # a process without samples does not count
        ("2-documents", "documents"),  # processes are weighted by their targets
        ("2-contrast", "contrast"),  # InfoNCE over the gathered batch, and batch norm over all samples
        ("2-teacher", "teacher"),
        ("4-mixed", "rope"),
        ("4-context", "language"),
        ("4-context-tensor", "language"),
    ],
)
def test_several_processes_train_as_one(runs, run, whole):
    same(runs / run, runs / f"one-{whole}")


def test_half_precision_is_close_and_biases_keep_their_precision(runs):
    """Weights are gathered in bfloat16, gradients added in float32. A row's mass is proportional to exp(b)."""
    replicated, sharded = (rows(runs / f"2-half-bias-{n}") for n in ("ddp", "fsdp"))
    assert sharded[0]["row_mass"] == pytest.approx(replicated[0]["row_mass"], rel=2e-3)
    assert sharded[0]["loss"] != replicated[0]["loss"]
    for a, b in zip(sharded, replicated, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=0.02)
        assert a["gradient_norm"] == pytest.approx(b["gradient_norm"], rel=0.1)
    assert len(rows(runs / "2-half-query")) == worker.STEPS  # the layer's bias that is no bias of logits


def test_resume_with_another_number_of_processes(runs):
    worker.run([{"folder": str(runs / "resumed"), "kind": "language", "resume": True}])
    same(runs / "resumed", runs / "one-language")


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_raises(runs, name):
    assert REFUSED[name][-1] in (runs / name / "error").read_text()


def test_a_folder_in_use_stops_all_processes(runs):
    assert "another process or thread is writing into" in (runs / "in-use" / "error-0").read_text()
    assert "the main process cannot write into" in (runs / "in-use" / "error-1").read_text()
    assert not (runs / "in-use" / "checkpoints").exists()


def test_sigterm_to_one_process_stops_all_after_the_same_step(runs):
    for rank in range(2):
        text = (runs / "stopped" / f"stopped-{rank}").read_text()
        assert text.startswith(f"{int(signal.SIGTERM)} stopped after 2 of 3 steps")
    assert [p.name for p in checkpoint.list_checkpoints(runs / "stopped" / "checkpoints")] == ["step-00000002"]
    for ours, theirs in zip(rows(runs / "stopped"), rows(runs / "one-language")[:2], strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=2e-4)
