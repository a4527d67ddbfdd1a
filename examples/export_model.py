"""Export a language model for any length: torch.export, a package compiled ahead of time, and ONNX.

python examples/export_model.py      # ONNX needs onnxscript and onnxruntime, AOTInductor a C++ compiler
python examples/export_model.py --only export onnx
"""

import argparse
import tempfile
from pathlib import Path

import torch
from torch.export import Dim

from sigattn.models import LanguageModel, LanguageModelConfig

LENGTHS = (5, 33)


def main():
    """Export a model, and compare each form with the model at two lengths."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=("export", "aot", "onnx"), default=("export", "aot", "onnx"))
    options = parser.parse_args()
    torch.manual_seed(0)
    size = {"num_layers": 1, "embed_dim": 32, "num_heads": 4, "vocab_size": 50, "max_seq_len": 64}
    model = LanguageModel(LanguageModelConfig(**size, position="alibi")).eval()
    tokens = torch.randint(50, (2, 20))
    program = torch.export.export(model, (tokens,), dynamic_shapes=({1: Dim("length", min=2, max=64)},))
    with tempfile.TemporaryDirectory() as folder:
        runs = {
            "export": lambda: program.module(),
            "aot": lambda: ahead_of_time(program, folder),
            "onnx": lambda: onnx(program, folder),
        }
        for name, make in runs.items():
            if name in options.only:
                run = make()
                for n in LENGTHS:
                    tokens = torch.randint(50, (2, n))
                    torch.testing.assert_close(run(tokens), model(tokens), rtol=1e-3, atol=1e-4)
                print(f"{name}: logits of {LENGTHS} tokens equal the model's")


def ahead_of_time(program, folder):
    """Compile an exported program into a package, and load it."""
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(Path(folder) / "model.pt2"))
    return torch._inductor.aoti_load_package(path)


def onnx(program, folder):
    """Translate an exported program to ONNX, and load it in ONNX Runtime."""
    import onnxruntime

    path = str(Path(folder) / "model.onnx")
    torch.onnx.export(program, dynamo=True).save(path)
    session = onnxruntime.InferenceSession(path)
    (name,) = (argument.name for argument in session.get_inputs())
    return lambda tokens: torch.from_numpy(session.run(None, {name: tokens.numpy()})[0])


if __name__ == "__main__":
    main()
