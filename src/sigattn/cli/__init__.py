"""Command-line interface: ``sigattn COMMAND --help`` lists the arguments of a command."""

import importlib.util
import sys
from collections.abc import Callable, Sequence

from sigattn import __version__, info

try:
    from sigattn.cli.convert import convert_run
    from sigattn.cli.corpus import make_tokenizer, pack_tokens
    from sigattn.cli.errors import exit_on_errors
    from sigattn.cli.evaluate import evaluate, export, generate, lm_eval, probe
    from sigattn.cli.parsing import run_command
    from sigattn.cli.theory import check_theory
    from sigattn.cli.train import list_recipes, train_demo, train_recipe

    if importlib.util.find_spec("matplotlib") is None:  # imported only where a figure is drawn, after the training
        raise ModuleNotFoundError(name="matplotlib")
except ModuleNotFoundError as _missing:
    if sys.argv[1:] in (["info"], ["--version"]):  # reports of errors ask for it, also where the extra is not installed
        print(info.describe() if sys.argv[1] == "info" else f"sigattn {__version__}")
        sys.exit()
    sys.exit(f"sigattn: the command line needs {_missing.name}: pip install 'sigattn[train]'")
except KeyboardInterrupt:
    sys.exit(130)

__all__ = ["main"]


def show_info() -> None:
    """Print versions, devices, and what each backend supports on this machine."""
    print(info.describe())


def train_help() -> None:
    """Train a recipe: sigattn recipes lists their names."""


COMMANDS: dict[str, Callable[..., object]] = {
    "demo": train_demo,
    "recipes": list_recipes,
    "train": train_help,
    "evaluate": evaluate,
    "generate": generate,
    "probe": probe,
    "convert": convert_run,
    "export": export,
    "lm-eval": lm_eval,
    "tokenizer": make_tokenizer,
    "pack": pack_tokens,
    "info": show_info,
    "theory": check_theory,
}
DESCRIPTION = (
    "Sigmoid self-attention for PyTorch. sigattn COMMAND --help lists the arguments of a command, sigattn --version "
    "prints the version."
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; ``sigattn.cli.errors`` lists the exit codes."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    with exit_on_errors("sigattn"):
        if arguments[:1] == ["train"]:
            train_recipe(arguments[1:])
        elif arguments == ["--version"]:
            print(f"sigattn {__version__}")
        else:
            run_command(COMMANDS, arguments, "sigattn", DESCRIPTION)
