"""Every architecture of the installed transformers: converted exactly and kept when saved, or refused and unchanged.

    python -m tests.integrations.sweep_conversion [ARCHITECTURE ...]

The smallest model that works is converted, the whole or else its parts until one runs all of its attention layers. The
reference is the same model with transformers' eager attention, in which softmax is replaced by the sigmoid with the
bias of each layer. The converted model is saved and loaded, and must give the same outputs.
"""

import argparse
import copy
import tempfile
import warnings
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from sigattn.conversion import ConversionError, convert
from sigattn.integrations import transformers as sigmoid
from sigattn.integrations.transformers.configured import is_attention
from tests.integrations import sweep_transformers as sweep
from tests.integrations import tiny_transformers as tiny
from tests.integrations.sweep_transformers import Result


def judge(architecture: str) -> Result:
    """Convert one architecture in the smallest configuration that works.

    Returns:
        Status "exact", "refused", "wrong", "failed" or "not built", as in ``sweep_transformers``.
    """
    warnings.filterwarnings("ignore")
    sigmoid.register()
    AttentionInterface.register("reference", sweep.reference_eager_attention_forward)
    AttentionMaskInterface.register("reference", sweep.reference_mask)
    result = Result(architecture, "not built", "no configuration")
    for make in (tiny.tiny_config, tiny.reduced_config):
        try:
            config = make(CONFIG_MAPPING[architecture])
            if tiny.size(config) > sweep.LARGEST:
                raise ValueError("too large")
            model = tiny.build(config, "eager")
        except Exception as error:
            result = Result(architecture, "not built", sweep.text_of(error))
            continue
        result = _judge(architecture, model)
        if result.status != "not built":
            break
    return result


def _judge(architecture: str, model: PreTrainedModel) -> Result:
    reason = "no inputs found"
    for name, part in tiny.parts(model):
        if name and not any(is_attention(m) for m in part.modules()):
            continue
        for inputs in tiny.inputs(part):
            try:
                with torch.no_grad():  # else models that keep their states could not be copied
                    sweep.run(part, inputs, None)
            except sweep.Unusable:
                continue
            try:
                problem = _problem(architecture, part, inputs)
            except ConversionError as error:
                reason = " ".join(str(error).split())
                if "do not reach the attention" in reason:
                    continue
                changed = part.config._attn_implementation != "eager" or any("sigmoid" in n for n in part.state_dict())
                return Result(architecture, "wrong" if changed else "refused", reason)
            except sweep.Unusable as error:
                reason = str(error)
                continue
            except Exception as error:
                return Result(architecture, "failed", f"{name}: {sweep.text_of(error)}")
            return Result(architecture, "wrong" if problem else "exact", f"{name or type(part).__name__}: {problem}")
    return Result(architecture, "not built", reason)


def _problem(architecture: str, eager: PreTrainedModel, inputs: dict[str, Any]) -> str:
    """Return what is wrong with the converted copy of a model, or an empty string.

    Raises:
        ConversionError: if it is refused.
    """
    model = copy.deepcopy(eager)
    softmax = [t.detach() for t in sweep.run(eager, inputs, None)]
    try:
        report = convert(model, [inputs, inputs])
    except ConversionError:
        unchanged = all(torch.equal(a, b) for a, b in zip(sweep.outputs(model, inputs), softmax, strict=True))
        if not unchanged or model.config._attn_implementation != "eager":
            return "the refused model was changed"
        raise
    if [layer.name for layer in report.layers] != [name for name, m in model.named_modules() if is_attention(m)]:
        return f"converted {[layer.name for layer in report.layers]}"
    learned = [(n.rpartition(".")[2], p.data) for n, p in model.named_parameters() if ".sigmoid_bias." in n]
    torch.manual_seed(0)
    for name, values in learned:  # c and a are compared; other parameters do nothing at 0
        values.copy_(values + 0.3 * torch.randn_like(values) if name in ("constant", "slope") else 0)
    if architecture in sweep.OWN_REFERENCE:
        for module in eager.modules():
            if isinstance(module, PreTrainedModel):
                module.config._attn_implementation_internal = "reference"
    problem = _compare(eager, model, inputs, softmax)
    for _, values in learned:
        values.add_(0.1 * torch.randn_like(values))
    if not problem and (problem := _saved(model, inputs)) and _saved(eager, inputs):
        return ""  # transformers does not load the softmax model as it was, either
    return problem


def _compare(eager: PreTrainedModel, model: PreTrainedModel, inputs: dict[str, Any], softmax: list[Tensor]) -> str:
    """Return how outputs differ from the reference's, in float64 if they do in float32; or an empty string."""
    biases = {
        eager.get_submodule(name): (layer.sigmoid_bias.constant, layer.sigmoid_bias.slope)
        for name, layer in model.named_modules()
        if is_attention(layer)
    }
    reference = sweep.EagerSigmoid(biases, model)
    expected = sweep.run(eager, inputs, reference)
    if not reference.calls:
        raise sweep.Unusable("no eager attention")
    problem = sweep.difference(sweep.outputs(model, inputs), expected, softmax)
    if problem and softmax[0].dtype is not torch.float64:
        double = {name: t.double() if t.is_floating_point() else t for name, t in inputs.items()}
        wide = copy.deepcopy(eager).double()
        return _compare(wide, copy.deepcopy(model).double(), double, sweep.run(wide, double, None))
    return problem


def _saved(model: PreTrainedModel, inputs: dict[str, Any]) -> str:
    """Return how the model differs after it was saved and loaded, or an empty string."""
    before = sweep.outputs(model, inputs)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded = type(model).from_pretrained(folder).eval()
    for name, parameter in model.named_parameters():
        if ".sigmoid_bias." in name and not torch.equal(loaded.get_parameter(name), parameter):
            return f"{name} was not loaded"
    after = sweep.outputs(loaded, inputs)[: len(before)]  # a part loaded alone may have a pooling layer more
    for found, expected in zip(after, before, strict=True):
        error = float((found - expected).detach().nan_to_num().abs().max())
        if error > 1e-5 * float(expected.detach().nan_to_num().abs().max()):
            return f"the loaded model's output differs by {error:.2g}"
    return ""


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("architectures", nargs="*", help="default: all of the registry")
    results = []
    for result in sweep.sweep(parser.parse_args().architectures or tiny.architectures(), judge):
        results.append(result)
        print(f"{result.architecture:32} {result.status:12} {result.why[:300]}", flush=True)
    print(Counter(result.status for result in results))


if __name__ == "__main__":
    main()
