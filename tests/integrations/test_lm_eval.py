"""Our models in lm-evaluation-harness: scores against a plain forward, and a task of our own, without a network."""

import importlib
import re
from pathlib import Path

import pytest
import torch

from tests.integrations.tasks import tokenizer_of_words, write_task
from tests.models.test_language import model_of

pytestmark = pytest.mark.filterwarnings("ignore")


def requests(*arguments):
    instance = importlib.import_module("lm_eval.api.instance").Instance
    return [instance("loglikelihood", {}, a, i) for i, a in enumerate(arguments)]


@pytest.fixture(scope="module")
def harness():
    """Return the integration, whose import takes seconds; not all processes that collect the tests run these."""
    pytest.importorskip("lm_eval")
    return importlib.import_module("sigattn.integrations.lm_eval")


@pytest.fixture(scope="module")
def model():
    return model_of({}, {"max_seq_len": 32, "num_layers": 2, "embed_dim": 32, "num_heads": 4})


@pytest.fixture(scope="module")
def lm(harness, model):
    return harness.SigattnLM(model, batch_size=3)


@torch.no_grad()
def scored(model, context, continuation):
    tokens = torch.tensor([[*context.encode(), *continuation.encode()]])
    log_p = model(tokens[:, :-1]).log_softmax(-1)[0]
    n = len(continuation.encode())
    expected, before = tokens[0, -n:], log_p[-n:]
    return before.gather(1, expected[:, None]).sum().item(), bool((before.argmax(-1) == expected).all())


def test_likelihoods(lm, model):
    greedy = model.generate([torch.tensor(list(b"a cat"))], 1, temperature=0.0)[0][5:]
    pairs = [("a cat", " sat"), ("the", " dog is hére"), ("a cat", chr(greedy)), ("x <0x00>Ā", "y")]
    for likelihood, pair in zip(lm.loglikelihood(requests(*pairs), disable_tqdm=True), pairs, strict=True):
        expected, best = scored(model, *pair)
        assert likelihood == (pytest.approx(expected, rel=1e-4), best)
    long = lm.loglikelihood(requests(("z" * 100 + "abc", "de")), disable_tqdm=True)[0][0]
    assert long == pytest.approx(scored(model, "z" * 28 + "abc", "de")[0], rel=1e-4)  # the last 33 tokens
    with pytest.raises(ValueError, match="does not fit in a context of 32"):
        lm.loglikelihood(requests(("a", "b" * 40)), disable_tqdm=True)


def test_rolling(lm, model):
    text = "the quick brown fox jumps over the lazy dog, and so on and on"
    (likelihood,) = lm.loglikelihood_rolling(requests((text,)), disable_tqdm=True)
    expected = scored(model, "\0", text[:32])[0] + scored(model, text[-33 : 32 - len(text)], text[32:])[0]
    assert likelihood == pytest.approx(expected, rel=1e-4)


def test_generation(lm, model):
    """Prompts of several lengths; a stop text; without a limit at least half of the context is the prompt's."""
    prompts = "a cat", "the dog"
    generated = lm.generate_until(
        requests(*((p, {"until": [], "max_gen_toks": 8}) for p in prompts)), disable_tqdm=True
    )
    for prompt, text in zip(prompts, generated, strict=True):
        (row,) = model.generate([torch.tensor(list(prompt.encode()))], 8, temperature=0.0)
        expected = lm.tok_decode(row[len(prompt) :].tolist())
        assert text == expected
        (cut,) = lm.generate_until(requests((prompt, {"until": [text[2]], "max_gen_toks": 8})), disable_tqdm=True)
        assert cut == text.split(text[2])[0]
    long = "the quick brown fox jumps over the lazy dog"
    (row,) = model.generate([torch.tensor(list(long.encode()[-16:]))], 16, temperature=0.0)
    assert lm.generate_until(requests((long, {})), disable_tqdm=True) == [lm.tok_decode(row[16:].tolist())]
    with pytest.raises(ValueError, match="32 new tokens leave no room for a prompt in a context of 32"):
        lm.generate_until(requests((long, {"max_gen_toks": 32})), disable_tqdm=True)


@pytest.mark.parametrize("end", [None, 0])
def test_only_an_end_token_stops_the_generation(end, harness, model, monkeypatch):
    """Token 0 is else one like the others."""
    tokenizer = tokenizer_of_words("!")
    lm = harness.SigattnLM(model, tokenizer, end_token=end)
    assert lm.tok_encode("the cat") == [2, 1]  # without the token that the tokenizer adds
    assert lm.tok_encode("cat!!") == tokenizer.encode("cat!!", add_special_tokens=False).ids
    new = torch.tensor([1, 0, 1])
    monkeypatch.setattr(lm.model, "generate", lambda input_ids, **_: torch.cat([input_ids, new[None]], 1))
    (text,) = lm.generate_until(requests(("the cat", {"max_gen_toks": 3})), disable_tqdm=True)
    assert text.split() == (["cat", "!", "cat"] if end is None else ["cat"])


def test_a_local_task(lm, harness, model, tmp_path, monkeypatch):
    rows = [{"question": f"{i} and", "choices": [" x", " yy", " z"], "answer": i % 3} for i in range(9)]
    write_task(tmp_path, rows, monkeypatch)
    scores = [[scored(model, row["question"], c)[0] for c in row["choices"]] for row in rows]
    right = sum(s.index(max(s)) == row["answer"] for s, row in zip(scores, rows, strict=True))
    assert harness.evaluate(lm, ["toy_local"], include=tmp_path)["toy_local"]["acc"] == pytest.approx(right / 9)
    with pytest.raises(ValueError, match="has no task nosuch"):
        harness.evaluate(lm, ["nosuch"], include=tmp_path)
    with pytest.raises(NotADirectoryError, match=r"toy\.yaml' is not a folder"):
        harness.evaluate(lm, ["toy_local"], include=tmp_path / "toy.yaml")


def test_the_harness_has_the_papers_tasks(harness):
    folder = Path(importlib.import_module("lm_eval").__file__).parent / "tasks"
    for name in harness.PAPER:
        assert any(re.search(rf"^task: {name}$", f.read_text(), re.M) for f in folder.glob(f"{name[:3]}*/*.yaml")), name
