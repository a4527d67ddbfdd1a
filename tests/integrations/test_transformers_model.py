"""Our language model among transformers' own."""

import functools
import json
import logging

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from sigattn import cli  # noqa: E402
from sigattn.cli.runs import write_run  # noqa: E402
from sigattn.data.tokens import END, train_tokenizer  # noqa: E402
from sigattn.integrations.transformers import model as model_integration  # noqa: E402
from sigattn.models import saving  # noqa: E402
from sigattn.models.language import LanguageModel, LanguageModelConfig  # noqa: E402
from sigattn.nn.documents import Documents  # noqa: E402
from sigattn.recipes import find_recipe  # noqa: E402
from tests.models.test_language import model_of as language_model  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
SMALL = {"vocab_size": 30, "max_seq_len": 64, "num_layers": 2, "embed_dim": 32, "num_heads": 4}
MODELS = [
    {"position": "alibi", "num_kv_heads": 2},
    {"position": "alibi", "attention_bias": "log_alibi"},
    {"position": "sincos", "tie_embeddings": False, "attention_bias": "log_visible"},
]
model_of = functools.partial(language_model, sizes=SMALL)


@pytest.mark.parametrize("settings", MODELS, ids=str)
def test_loaded_by_name_and_generating(settings, tmp_path):
    model = model_of(settings)
    model_integration.export(model, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.randint(1, 30, (2, 7))
    torch.testing.assert_close(loaded(ids).logits, model(ids))
    common = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    padded = torch.cat([torch.tensor([[0, 0, 0], [0, 4, 5]]), ids], 1)
    mask = torch.cat([torch.tensor([[0, 0, 0], [0, 1, 1]]), torch.ones_like(ids)], 1)
    first, second = model.generate([ids[0], padded[1, 1:]], 6, temperature=0.0)
    for how in ({}, {"use_cache": False}, {"cache_implementation": "static"}):
        generated = loaded.generate(padded, attention_mask=mask, **common, **how)
        assert torch.equal(generated[0, 3:], first), how
        assert torch.equal(generated[1, 1:], second), how


def test_generating_uses_no_deprecated_name(monkeypatch):
    """Of the cache, which transformers 5.24 renamed."""
    warned = []
    for name in ("warning", "warning_once"):
        monkeypatch.setattr(logging.Logger, name, lambda _, message, *args: warned.append(message))
    ids, model = torch.randint(1, 30, (2, 7)), model_integration.wrap(model_of(MODELS[0]))
    output = model(ids, use_cache=True)
    assert output[1].get_seq_length() == 7
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, do_sample=False, pad_token_id=0)
    assert not [message for message in warned if "deprecated" in message]


def test_beams():
    """As many beams as tokens, so that no pair of tokens is left out."""
    model = model_of(MODELS[0])
    ids, pairs = torch.randint(1, 30, (2, 7)), torch.cartesian_prod(torch.arange(30), torch.arange(30))
    options = {"max_new_tokens": 2, "num_beams": 30, "do_sample": False, "pad_token_id": 0}
    beams = model_integration.wrap(model).generate(ids, attention_mask=torch.ones_like(ids), **options)
    for prompt, beam in zip(ids, beams, strict=True):
        log_p = model(torch.cat([prompt.expand(900, -1), pairs], 1)).log_softmax(-1)[:, 6:8]
        likeliest = pairs[log_p.gather(2, pairs[:, :, None]).sum((1, 2)).argmax()]
        assert torch.equal(beam[7:], likeliest)


def test_training():
    """Loss and gradients; padding on the right; documents; checkpointed blocks."""
    model = model_of({})
    wrapped = model_integration.wrap(model).train()
    ids = torch.randint(1, 30, (2, 9))
    labels = ids.clone()
    labels[0, 6:] = -100
    mask = torch.ones_like(ids)
    mask[0, 6:] = 0
    loss = wrapped(ids, attention_mask=mask, labels=labels).loss
    logits = model(ids)[:, :-1].flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=-100)
    torch.testing.assert_close(loss, expected)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    wrapped.gradient_checkpointing_enable()
    assert wrapped.model.checkpoint_activations
    assert wrapped.is_gradient_checkpointing
    again = torch.autograd.grad(wrapped(ids, labels=labels).loss, list(model.parameters()))
    wrapped.gradient_checkpointing_disable()
    for a, b in zip(gradients, again, strict=True):
        torch.testing.assert_close(a, b)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5, 6, 7, 8]])
    documents = Documents(
        torch.tensor([[0] * 3 + [1] * 6, [0] * 9]), positions, torch.tensor([0, 3, 9, 18], dtype=torch.int32)
    )
    torch.testing.assert_close(wrapped(ids, position_ids=positions).logits, model(ids, documents=documents))
    assert wrapped(ids, logits_to_keep=2).logits.shape == (2, 2, 30)


def test_training_with_padding_on_the_left():
    """Each row has the logits and the gradients that it has alone; one has padding on both sides."""
    model = model_of({})
    wrapped = model_integration.wrap(model).train()
    ids, spans = torch.randint(1, 30, (3, 9)), [(4, 9), (0, 9), (2, 7)]
    mask = torch.stack([torch.tensor([start <= i < stop for i in range(9)]) for start, stop in spans]).long()
    logits = wrapped(ids, attention_mask=mask).logits
    ours = torch.cat([row[start:stop] for row, (start, stop) in zip(logits, spans, strict=True)])
    theirs = torch.cat([model(row[None, start:stop])[0] for row, (start, stop) in zip(ids, spans, strict=True)])
    torch.testing.assert_close(ours, theirs)
    gradients = (torch.autograd.grad(out.square().mean(), list(model.parameters())) for out in (ours, theirs))
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("tied", [False, True])
def test_a_vocabulary_that_grows(tied, tmp_path):
    model = model_of({"tie_embeddings": tied})
    wrapped, ids = model_integration.wrap(model), torch.randint(1, 30, (2, 7))
    expected = model(ids)
    wrapped.resize_token_embeddings(33)
    assert wrapped(ids).logits.shape == (2, 7, 33)
    torch.testing.assert_close(wrapped(ids).logits[..., :30], expected)
    assert wrapped.config.vocab_size == wrapped.model.config.vocab_size == 33
    assert torch.equal(model(ids), expected)
    assert len(model.embedding.weight) == model.config.vocab_size == 30
    wrapped.save_pretrained(tmp_path)
    torch.testing.assert_close(AutoModelForCausalLM.from_pretrained(tmp_path)(ids).logits, wrapped(ids).logits)


@pytest.mark.parametrize("tied", [False, True])
def test_tied_weights_are_those_of_the_configuration(tied, tmp_path):
    """Also in a folder of an earlier version, whose configuration denied that they are tied; and they can be untied."""
    model, ids = model_of({"tie_embeddings": tied}), torch.randint(1, 30, (2, 7))
    keys = list(model.state_dict())
    model_integration.export(model, tmp_path)
    assert list(model.state_dict()) == keys
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    assert config["tie_word_embeddings"] is tied
    path.write_text(json.dumps({**config, "tie_word_embeddings": False}))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert (loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight) is tied
    torch.testing.assert_close(loaded(ids).logits, model(ids))
    untied = AutoModelForCausalLM.from_pretrained(tmp_path, tie_word_embeddings=False)
    weight = untied.get_output_embeddings().weight
    assert weight is not untied.get_input_embeddings().weight
    assert 0 < weight.std() < 1  # initialised, where the checkpoint has none
    untied.save_pretrained(tmp_path / "untied")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "untied")
    torch.testing.assert_close(again(ids).logits, untied(ids).logits)


def test_spread_over_devices(tmp_path):
    """A block stays whole; weights that are offloaded are read again, or the output that needs them raises."""
    accelerate = pytest.importorskip("accelerate")
    ids = torch.randint(1, 30, (2, 7))
    for tied in (False, True):
        model = model_of({"tie_embeddings": tied})
        folder = tmp_path / str(tied)
        model_integration.export(model, folder)
        loaded = AutoModelForCausalLM.from_pretrained(
            folder, device_map="auto", max_memory={"cpu": 60_000}, offload_folder=folder / "disk"
        )
        assert set(loaded.hf_device_map.values()) == {"cpu", "disk"}
        assert not [name for name in loaded.hf_device_map if name.startswith("model.blocks.") and name.count(".") > 2]
        with torch.no_grad():
            torch.testing.assert_close(loaded(ids).logits, model(ids))
            offloaded = accelerate.cpu_offload(model_of({"tie_embeddings": tied}), execution_device="cpu")
            if not tied:
                torch.testing.assert_close(offloaded(ids), model(ids))
                continue
            with pytest.raises(RuntimeError, match="were offloaded: keep the embedding on its device"):
                offloaded(ids)


IDS = torch.tensor([[3, 14, 15, 9, 26]])
ONES, PADDED = torch.ones_like(IDS), torch.tensor([[0, 0, 1, 1, 1]])
SHIFTED, RESTARTED = torch.tensor([[1, 2, 3, 4, 5]]), torch.tensor([[0, 1, 0, 1, 2]])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"attention_mask": torch.tensor([[1, 0, 1, 1, 1]])}, "not tokens between others"),
        ({"attention_mask": torch.ones(1, 1, 5, 5)}, r"attention_mask must be \(B, N\)"),
        *(({"attention_mask": m, "position_ids": SHIFTED}, "must count from 0") for m in (None, PADDED)),
        ({"attention_mask": ONES, "position_ids": RESTARTED}, "position_ids must count from 0"),
        ({"input_ids": None, "inputs_embeds": torch.zeros(1, 5, 32)}, "does not support inputs_embeds"),
        ({"unknown": 1}, "does not support unknown"),
        ({"input_ids": None, "attention_mask": PADDED}, "needs input_ids"),
    ],
)
def test_calls_that_it_does_not_support_are_refused(arguments, message):
    wrapped = model_integration.wrap(model_of({})).eval()
    with pytest.raises(ValueError, match=message):
        wrapped(**{"input_ids": IDS, **arguments})


def test_options_of_calls_and_of_the_configuration():
    wrapped = model_integration.wrap(model_of({})).train()
    for options in ({"gradient_checkpointing_kwargs": {"use_reentrant": True}}, {"offload": True}):
        with pytest.raises(ValueError, match=r"use (use_reentrant|offload)=False"):
            wrapped.gradient_checkpointing_enable(**options)
    with pytest.raises(ValueError, match="computes sigmoid attention by its own layers"):
        wrapped.set_attn_implementation("sdpa")
    wrapped.eval()(IDS, attention_mask=PADDED, position_ids=torch.tensor([[1, 1, 0, 1, 2]]))
    wrapped.config.output_hidden_states = True
    with pytest.raises(ValueError, match="does not support output_hidden_states"):
        wrapped(IDS)
    wrapped(IDS, output_hidden_states=False)
    wrapped.config.output_hidden_states = False
    loss, logits = wrapped(IDS, labels=IDS, return_dict=False, output_attentions=False, inputs_embeds=None)
    assert torch.equal(logits, wrapped(IDS).logits)
    assert torch.equal(loss, wrapped(IDS, labels=IDS).loss)


def test_a_tokenizer_goes_along(tmp_path):
    (tmp_path / "text.txt").write_text("a cat and a dog " * 20)
    tokenizer = train_tokenizer(tmp_path / "text.txt", 270, tmp_path / "t.json")
    model = LanguageModel(LanguageModelConfig(**{**SMALL, "vocab_size": 270}))
    model_integration.export(model, tmp_path / "out", tmp_path / "t.json", END)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs("a cat").input_ids == tokenizer.encode("a cat").ids
    assert loaded.config.eos_token_id == tokenizer.token_to_id(END) == theirs.eos_token_id
    batch = theirs(["a cat and", "a"], return_tensors="pt", padding=True)
    assert batch.attention_mask[1, 0] == 0  # on the left
    assert loaded.generate(**batch, max_new_tokens=4, do_sample=False).shape[0] == 2
    with pytest.raises(FileExistsError, match=r"t\.json"):
        model_integration.export(model, tmp_path / "t.json")


def test_a_model_of_bytes_has_a_tokenizer_that_its_server_can_use(tmp_path):
    """Also of text that is not ASCII, and of names that look like tokens; a cut character is replaced."""
    saving.save(LanguageModel(LanguageModelConfig(**{**SMALL, "vocab_size": 256})), tmp_path / "run" / "model")
    write_run(tmp_path / "run", find_recipe("lm-1b-2k-tiny"), "lm-1b-2k-tiny", None, None)
    cli.main(["export", str(tmp_path / "run"), str(tmp_path / "out")])
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in ("def f(x):\n\treturn  x ", " σ ≤ 1 – 🦜", "<0x41> [UNK] </s>"):
        assert theirs(text).input_ids == list(text.encode())
        assert theirs.decode(list(text.encode())) == text
    assert theirs.decode([65, 0xCF]) == "A\N{REPLACEMENT CHARACTER}"
    theirs.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    theirs.save_pretrained(tmp_path / "out")
    again = AutoTokenizer.from_pretrained(tmp_path / "out")
    messages = [{"role": "user", "content": "class "}]
    assert again.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == "class "
    loaded, inputs = AutoModelForCausalLM.from_pretrained(tmp_path / "out"), again("class ", return_tensors="pt")
    assert loaded.generate(**inputs, max_new_tokens=2, tokenizer=again).shape == (1, 8)  # a server passes it on
