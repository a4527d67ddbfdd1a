"""Our models in lm-evaluation-harness: scores against a plain forward, and a task of our own, without a network."""

import importlib
import re
from pathlib import Path

import pytest
import torch

lm_eval = pytest.importorskip("lm_eval")

from sigattn.integrations import lm_eval as harness  # noqa: E402
from sigattn.models.language import LanguageModel, LanguageModelConfig  # noqa: E402
from tests.integrations.tasks import write_task  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


class Request:
    def __init__(self, *args):
        self.args = args


@pytest.fixture
def lm():
    torch.manual_seed(0)
    model = LanguageModel(LanguageModelConfig(max_seq_len=32, num_layers=2, embed_dim=32, num_heads=4))
    with torch.no_grad():
        model.embedding.weight.mul_(5)
    return harness.SigattnLM(model, batch_size=3, end_token=0)


def scored(model, context, continuation):
    tokens = torch.tensor([[*context.encode(), *continuation.encode()]])
    log_p = model(tokens[:, :-1]).log_softmax(-1)[0]
    n = len(continuation.encode())
    wanted, before = tokens[0, -n:], log_p[-n:]
    return before.gather(1, wanted[:, None]).sum().item(), bool((before.argmax(-1) == wanted).all())


def test_likelihoods(lm):
    pairs = [("a cat", " sat"), ("the", " dog is here"), ("x", "y"), ("one two", " three")]
    found = lm.loglikelihood([Request(*p) for p in pairs], disable_tqdm=True)
    for (value, greedy), pair in zip(found, pairs, strict=True):
        expected, best = scored(lm.model, *pair)
        assert value == pytest.approx(expected, rel=1e-4)
        assert greedy == best
    (row,) = lm.model.generate([torch.tensor(list(b"a cat"))], 3, temperature=0.0)
    tail = bytes(row[5:].tolist()).decode(errors="replace")
    if "\ufffd" not in tail and not tail.startswith(" "):
        assert lm.loglikelihood([Request("a cat", tail)], disable_tqdm=True)[0][1]
    long = lm.loglikelihood([Request("z" * 100 + "abc", "de")], disable_tqdm=True)[0][0]
    assert long == pytest.approx(scored(lm.model, "z" * 28 + "abc", "de")[0], rel=1e-4)  # the last 33 tokens
    with pytest.raises(ValueError, match="does not fit in a context of 32"):
        lm.loglikelihood([Request("a", "b" * 40)], disable_tqdm=True)


def test_rolling(lm):
    text = "the quick brown fox jumps over the lazy dog, and so on and on"
    (found,) = lm.loglikelihood_rolling([Request(text)], disable_tqdm=True)
    first = scored(lm.model, "\0", text[:32])[0]
    tokens = torch.tensor([list(text.encode())[-33:]])
    log_p = lm.model(tokens[:, :-1]).log_softmax(-1)[0]
    rest = len(text) - 32
    second = log_p[-rest:].gather(1, tokens[0, -rest:, None]).sum().item()
    assert found == pytest.approx(first + second, rel=1e-4)


def test_generation_stops(lm):
    (free,) = lm.generate_until([Request("a cat", {"until": [], "max_gen_toks": 20})])
    (row,) = lm.model.generate([torch.tensor(list(b"a cat"))], 20, temperature=0.0, stop_tokens=[0])
    made = row[5:].tolist()
    made = made[: made.index(0)] if 0 in made else made
    assert free == bytes(made).decode(errors="replace")
    if len(free) > 2:
        (cut,) = lm.generate_until([Request("a cat", {"until": [free[2]], "max_gen_toks": 20})])
        assert cut == free.split(free[2])[0]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"max_new_tokens": 7, "do_sample": False, "temperature": 0.8, "num_beams": 1}, (7, {"temperature": 0.0})),
        ({"max_tokens": 5, "max_gen_toks": 3, "temperature": 0.5}, (3, {"temperature": 0.5})),
        ({"max_gen_toks": 3, "do_sample": True, "temperature": 0.2, "top_p": 0.95, "top_k": 9},
         (3, {"temperature": 0.2, "top_p": 0.95, "top_k": 9})),
        ({"max_gen_toks": 3, "top_p": 0.95}, (3, {"temperature": 0.0})),
    ],
    ids=str,
)  # fmt: skip
def test_options_of_a_task(lm, monkeypatch, options, expected):
    """The names and the meaning of the harness's own models (``normalize_gen_kwargs``)."""
    calls, generate = [], lm.model.generate
    monkeypatch.setattr(lm.model, "generate", lambda *a, **k: calls.append((a[1], k)) or generate(*a, **k))
    lm.generate_until([Request("a cat", options)])
    ((steps, given),) = calls
    assert (steps, {n: v for n, v in given.items() if v is not None and n != "stop_tokens"}) == expected


def test_unsupported_options_of_a_task(lm):
    with pytest.raises(ValueError, match=r"does not support .*num_beams=4, repetition_penalty=1\.2"):
        lm.generate_until([Request("a", {"num_beams": 4, "repetition_penalty": 1.2, "max_gen_toks": 3})])


def test_long_prompts_keep_half_of_the_context(lm, monkeypatch):
    """The harness's default of 256 new tokens is more than this context of 32."""
    prompts, generate = [], lm.model.generate
    monkeypatch.setattr(lm.model, "generate", lambda rows, *a, **k: prompts.append(rows[0]) or generate(rows, *a, **k))
    for prompt, limit in ((b"the quick brown fox jumps over the lazy dog", 16), (b"a cat", 27)):
        (text,) = lm.generate_until([Request(prompt.decode(), {"max_gen_toks": 256})])
        assert bytes(prompts.pop().tolist()) == prompt[-16:]
        assert len(text) <= limit


def test_tokenizer_without_an_end_token(lm, tmp_path, monkeypatch):
    """Token 0 is then one like the others, and does not stop the generation."""
    monkeypatch.setattr(lm.model, "generate", lambda rows, n, stop_tokens, **_: (torch.tensor([*rows[0], *[0] * n]),))
    assert lm.generate_until([Request("a cat", {"max_gen_toks": 3})]) == [""]
    command = importlib.import_module("sigattn.cli.evaluate")
    adapters = []
    monkeypatch.setattr(command, "load_language_model", lambda _: (lm.model, None, None))
    monkeypatch.setattr(harness, "evaluate", lambda adapter, *_, **__: adapters.append(adapter) or {})
    command.lm_eval(tmp_path)
    assert adapters[0].generate_until([Request("a cat", {"max_gen_toks": 3})]) == ["\0" * 3]


def test_a_local_task(lm, tmp_path, monkeypatch):
    rows = [{"question": f"{i} and", "choices": [" x", " yy", " z"], "answer": i % 3} for i in range(9)]
    write_task(tmp_path, rows, monkeypatch)
    found = harness.evaluate(lm, ["toy_local"], include=tmp_path)
    right = 0
    for row in rows:
        scores = [scored(lm.model, row["question"], c)[0] for c in row["choices"]]
        right += scores.index(max(scores)) == row["answer"]
    assert found["toy_local"]["acc"] == pytest.approx(right / 9)
    with pytest.raises(ValueError, match="has no task nosuch"):
        harness.evaluate(lm, ["nosuch"], include=tmp_path)
    with pytest.raises(NotADirectoryError, match=r"toy\.yaml' is not a folder"):
        harness.evaluate(lm, ["toy_local"], include=tmp_path / "toy.yaml")


@pytest.mark.parametrize("name", harness.PAPER)
def test_the_harness_has_the_papers_tasks(name):
    folder = Path(lm_eval.__file__).parent / "tasks"
    assert any(re.search(rf"^task: {name}$", f.read_text(), re.M) for f in folder.glob(f"{name[:3]}*/*.yaml"))
