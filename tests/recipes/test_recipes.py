"""Every registered recipe builds, has a softmax twin that differs in attention only, and a tiny form that trains."""

import types
import typing
import wave
from dataclasses import fields, replace

import pytest
import torch

from sigattn.models.saving import build
from sigattn.nn.guide import recommend
from sigattn.recipes import RECIPES, find_recipe
from sigattn.recipes.datasets import load_dataset
from sigattn.validation import SettingsError

pytestmark = pytest.mark.filterwarnings("ignore:.*Ramapuram et al., 2025")

# Table "practioners" of the paper, row by row: position, QK norm, LayerScale, bias, norm strategy
PAPER = {
    "vit-supervised": ("Vision", "Supervised", "87M", "Learnable", "Yes", "Yes", "No", "Pre-Norm"),
    "vit-byol": ("Vision", "BYOL", "87M", "Learnable", "Yes", "Yes", "No", "Pre-Norm"),
    "vit-simclr": ("Vision", "SimCLR", "87M", "SinCos", "Yes", "Yes", "No", "Pre-Norm"),
    "vit-mae": ("Vision", "MAE", "304M", "Learnable", "Yes", "Yes", "Yes", "Pre-Norm"),
    "asr-ls960": ("ASR", "Supervised (CTC)", "100M-250M", "S/C/A/R", "Yes", "Yes", "Yes", "Pre-Norm"),
    "asr-ls960-hybrid": ("ASR", "Supervised (CTC)", "100M-250M", "RoPE", "No", "Yes", "No", "Hybrid-Norm"),
    "lm-1b-2k": ("AR Language", "Next-token (<=2k seq len)", "1B", "ALiBi", "Yes", "No", "Yes", "Pre-Norm"),
    "lm-1b-2k-hybrid": ("AR Language", "Next-token (<=2k seq len)", "1B", "ALiBi", "Yes", "No", "No", "Hybrid-Norm"),
    "lm-1b-4k": ("AR Language", "Next-token (>2k seq len)", "1B", "ALiBi", "Yes", "No", "No", "Hybrid-Norm"),
}


def enumerated(config):
    """Iterate over the names and values of a configuration's fields of few values: literals, bools and None."""
    for name, kind in typing.get_type_hints(type(config)).items():
        is_union = typing.get_origin(kind) in (types.UnionType, typing.Union)  # of literals it is the latter
        options = typing.get_args(kind) if is_union else (kind,)
        for option in options if name in {field.name for field in fields(config)} else ():
            if typing.get_origin(option) is typing.Literal:
                yield from ((name, value) for value in typing.get_args(option))
            if option in (bool, types.NoneType):
                yield from ((name, value) for value in ((True, False) if option is bool else (None,)))


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    """Return a function from a tiny recipe to a batch of its data; speech is noise in the layout of the digits."""
    recordings, batches = tmp_path_factory.mktemp("recordings"), {}
    for digit in range(10):
        for index in (0, 5):  # held out, training
            with wave.open(str(recordings / f"{digit}_speaker_{index}.wav"), "wb") as file:
                file.setparams((1, 2, 8000, 0, "NONE", ""))
                file.writeframes(torch.randint(-3000, 3000, (3200,), dtype=torch.int16).numpy().tobytes())

    def make(recipe):
        key = recipe.domain, recipe.task.num_views
        if key not in batches:
            path = recordings if recipe.domain == "ASR" else None
            batches[key] = load_dataset(recipe, path).batch(0, 6, seed=0)
        return batches[key]

    return make


def first_of_each(key):
    """Return the names of the first recipe of each value of ``key(tiny form)``."""
    first = {}
    for name, recipe in RECIPES.items():
        first.setdefault(key(recipe.tiny()), name)
    return list(first.values())


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_recipe_is_documented_and_its_softmax_twin_differs_in_attention_only(recipe):
    assert f"sigattn train {recipe.name} " in recipe.documentation()
    assert all((recipe.about, recipe.hardware, recipe.paper))
    recipe.task.check(recipe.with_transformer(num_layers=1).model)
    recipe = recipe.tiny()
    twin = recipe.softmax()
    assert twin.documentation() == recipe.documentation()
    assert twin.transformer.activation == "softmax"
    before, after = vars(recipe.transformer), vars(twin.transformer)
    changed = {name for name in before if before[name] != after[name]}
    assert changed <= {"activation", "attention_bias", "learn_bias", "qk_norm"}
    assert (twin.training, twin.task, twin.data) == (recipe.training, recipe.task, recipe.data)
    ours, theirs = ({n: p.shape for n, p in build(r.model, "meta").named_parameters()} for r in (recipe, twin))
    named = set(ours.keys() ^ theirs.keys())
    assert all(n.endswith(("query_norm.weight", "key_norm.weight", "attention.attention_bias.value")) for n in named)
    assert named == set() or changed & {"qk_norm", "learn_bias"}
    assert all(ours[n] == theirs[n] for n in ours.keys() & theirs.keys())


@pytest.mark.parametrize("name", first_of_each(lambda tiny: repr((tiny.model, tiny.task))))
def test_tiny_form_learns(name, example):
    recipe, small = find_recipe(name), find_recipe(f"{name}-tiny")
    for what in ("position", "norm_placement", "qk_norm", "feed_forward", "norm", "activation", "attention_bias"):
        assert getattr(small.transformer, what, None) == getattr(recipe.transformer, what, None)
    assert small.parameters() < 500_000
    small = small.with_transformer(dropout=0.0, drop_path=0.0, num_layers=1)
    module = small.task.build(small.model)
    batch = example(small)
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=1e-3)

    def loss():
        torch.manual_seed(1)  # the same patches hidden, the same shifts
        return small.task.loss(module, batch)

    first = loss()
    for _ in range(3):
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.step()
        small.task.after_step(module, 256)
    assert not [n for n, p in module.named_parameters() if p.requires_grad and p.grad is None]
    assert loss() < first
    assert small.task.metric in small.task.evaluate(module.eval(), [batch])


@pytest.mark.usefixtures("unchecked")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["vit-byol", "vit-mae", "asr-ls960", "asr-conformer-ls960", "lm-85m-2k"])
def test_compiled_loss_and_gradients_agree(name, example):
    torch._dynamo.reset()
    small = find_recipe(f"{name}-tiny").with_transformer(dropout=0.0, drop_path=0.0, num_layers=1)
    module = small.task.build(small.model)
    module.train(getattr(small.transformer, "position", None) != "cape")  # which draws
    batch = example(small)
    grads = []
    for run in (module, torch.compile(module, backend="eager", fullgraph=True)):
        module.zero_grad()
        torch.manual_seed(1)
        loss = small.task.loss(run, batch)
        loss.backward()
        grads.append([loss.detach(), *(p.grad.clone() for p in module.parameters() if p.grad is not None)])
    # in norm: with batch normalisation, rounding alone changes single elements by more (1e-5 of the norm)
    for a, b in zip(*grads, strict=True):
        assert (a - b).norm() <= 1e-4 * b.norm() + 1e-5


def test_guide_equals_the_papers_table():
    assert find_recipe("vit-supervised").guide_row()["Model Size"] == "87M"
    for name, paper in PAPER.items():
        ours = tuple(find_recipe(name).with_transformer(num_layers=1).guide_row().values())
        assert ours[:2] == paper[:2]
        assert paper[3] in (ours[3], "S/C/A/R")
        assert ours[4:] == paper[4:]
    # 330M parameters with the decoder, 304M (as in the table) without it
    assert find_recipe("vit-mae").transformer.num_layers == 24


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        *((f"vit-{objective}", ("vision", objective)) for objective in ("supervised", "byol", "simclr", "mae")),
        *(("asr-ls960", ("speech",)), ("lm-1b-2k", ("language", None, 2048)), ("lm-1b-4k", ("language", None, 2049))),
    ],
)
def test_recommend_names_the_recipes(name, arguments):
    advice, t = recommend(*arguments), find_recipe(name).transformer
    assert advice.recipe == name
    assert advice.attention_bias == (t.DEFAULT_BIAS if t.attention_bias is None else t.attention_bias)


def test_find_recipe():
    """A tiny form keeps shared key heads; an unknown name is an error that lists the others."""
    assert find_recipe("lm-1b-2k").with_transformer(num_kv_heads=8).tiny().transformer.num_kv_heads == 1
    assert find_recipe("vit-mae-tiny").model.encoder.embed_dim == 64
    assert find_recipe("lm-1b-2k-softmax").name == "lm-1b-2k-softmax"
    with pytest.raises(SettingsError, match="no recipe is called 'lm-2b'; sigattn recipes lists them: vit-supervised"):
        find_recipe("lm-2b")


def test_training_is_the_papers():
    """App. G.3: decay of 1e-4, decoupled following Loshchilov & Hutter; the tiny forms and other domains use PyTorch's.

    Vision has the paper's epochs and linearly scaled rate. The conformer starts SpecAugment late.
    """
    independent = {name for name in RECIPES if find_recipe(name).training.independent_decay}
    assert independent == {"lm-85m-2k", "lm-1b-2k", "lm-1b-2k-hybrid", "lm-1b-4k", "lm-7b-4k"}
    assert {find_recipe(name).training.weight_decay for name in independent} == {1e-4}
    assert not any(find_recipe(f"{name}-tiny").training.independent_decay for name in RECIPES)
    training = find_recipe("vit-supervised").training
    assert training.max_steps == 300 * 312  # whole batches of 4096 in 1,281,167 images
    assert training.learning_rate == pytest.approx(1.6e-3)  # 1e-4 for 256
    speech = ("asr-ls960", "asr-conformer-ls960", "asr-conformer-ls960-tiny")
    assert [find_recipe(name).data.spec_augment_from for name in speech] == [0, 10_000, None]


FAMILIES = ["lm-1b-2k", "vit-supervised", "vit-byol", "vit-simclr", "vit-mae", "asr-ls960"]
SAME_BLOCKS = FAMILIES[2:5]  # as those of vit-supervised


def variants(recipe):
    fields = [{name: value} for name, value in enumerated(recipe.transformer)]
    if recipe.name.removesuffix("-tiny") in SAME_BLOCKS:
        fields = [change for change in fields if "attention_bias" in change]
    for change in fields:
        yield change, lambda c=change: recipe.with_transformer(**c)
    for name, value in enumerated(recipe.task):
        yield {name: value}, lambda c={name: value}: replace(recipe, task=replace(recipe.task, **c))


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.usefixtures("unchecked")
def test_every_enumerated_value_works_or_is_refused_before_training(name, example):
    """What is refused is refused by a ValueError when the module is built, as before anything is written."""
    recipe = find_recipe(f"{name}-tiny").with_transformer(num_layers=1, embed_dim=8, num_heads=2, mlp_dim=8)
    batch, works = example(recipe), 0
    for changes, change in variants(recipe):
        try:
            changed = change()
            module = changed.task.build(changed.model)
        except ValueError:
            continue
        loss = changed.task.loss(module, batch)
        loss.backward()
        assert torch.isfinite(loss), changes
        assert all(p.grad is None or p.grad.isfinite().all() for p in module.parameters()), changes
        works += 1
    assert works >= (4 if name in SAME_BLOCKS else 20)
