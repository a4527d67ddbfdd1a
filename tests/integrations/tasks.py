"""A task of lm-evaluation-harness that needs no network, and a tokenizer."""

import functools
import importlib
import json

import pytest

TASK = """
task: toy_local
dataset_path: json
dataset_kwargs:
  data_files:
    test: {path}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list:
  - metric: acc
"""


def write_task(folder, rows, monkeypatch):
    """Write the task, and let the harness know no other: it takes 14 s to read its 14,000 tasks."""
    (folder / "rows.json").write_text("\n".join(map(json.dumps, rows)))
    (folder / "toy.yaml").write_text(TASK.format(path=folder / "rows.json"))
    harness = importlib.import_module("sigattn.integrations.lm_eval")
    monkeypatch.setattr(harness, "TaskManager", functools.partial(harness.TaskManager, include_defaults=False))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def tokenizer_of_words(end):
    """Return a tokenizer of an end token, which it adds to a text, "cat" and "the"."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({end: 0, "cat": 1, "the": 2}, "the"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(f"$A {end}", special_tokens=[(end, 0)])
    return tokenizer
