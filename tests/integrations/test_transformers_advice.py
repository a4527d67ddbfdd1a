"""What the refusal of attn_implementation="sigmoid" says to call, per kind of model, works."""

import re

import pytest
import torch

pytest.importorskip("transformers")

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from sigattn import convert
from sigattn.integrations import transformers as sigmoid
from tests.integrations import tiny_transformers as tiny

pytestmark = pytest.mark.filterwarnings("ignore")


def tiny_model(architecture):
    sigmoid.register()
    for make in (tiny.tiny_config, tiny.reduced_config):
        try:
            return tiny.build(make(CONFIG_MAPPING[architecture]), None)
        except Exception as error:
            reason = error
    raise reason


def runs(model, inputs):
    try:
        with torch.no_grad():
            model(**{name: value.clone() for name, value in inputs.items()})
    except Exception:
        return False
    return True


@pytest.mark.parametrize(
    ("architecture", "works"),
    [
        *(("falcon", "all"), ("wavlm", "all"), ("xclip", "all")),
        ("deformable_detr", "some"),
        *(("siglip", "layers"), ("aria", "layers")),
        *(("bloom", "none"), ("git", "none"), ("bigbird_pegasus", "none")),
    ],
)
def test_the_advice_of_a_refusal_works(architecture, works):
    """What the message says to call converts the model, or nothing can and it says so."""
    model = tiny_model(architecture)
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match=r"\. (Build|Its layers) ") as refusal:
        model.set_attn_implementation("sigmoid")
    assert model.config._attn_implementation == before
    message = str(refusal.value)
    example = next(x for x in tiny.inputs(model) if runs(model, x))
    if works == "none":
        assert message.endswith("where nothing can replace it: use another model")
        with pytest.raises(ValueError, match="compute a softmax themselves"):
            convert(model, example=example)
    elif works == "layers":
        calls = re.findall(r"sigattn\.(convert\(model\.get_submodule\('[^']*'\)\))", message)
        assert calls
        for call in [*calls, 'model.set_attn_implementation("sigmoid")']:
            eval(call, {"convert": convert, "model": model})
        assert runs(model, example)
    else:
        (call,) = re.findall(r"sigattn\.(convert\(model, example=.*?\)) with arguments", message)
        report = eval(call, {"convert": convert, "model": model, "example": example})
        assert any(entry.outcome == "converted" for entry in report.softmax)
        assert ("keep" in call) == (works == "some")
        assert runs(model, example)
