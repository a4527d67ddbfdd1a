"""The command line: ``sigattn COMMAND --help`` says what each command takes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

try:
    import tyro

    from sigattn import info
    from sigattn.bench.provenance import BenchmarkError
    from sigattn.cli.bench import BENCHMARKS
    from sigattn.cli.demo import run_demo
    from sigattn.cli.ecosystem import export, lm_eval
    from sigattn.cli.recipes import compare_all, list_recipes, show_norms
    from sigattn.cli.reproduce import reproduce
    from sigattn.cli.theory import run_theory
    from sigattn.cli.train import evaluate, generate, make_tokenizer, pack_tokens, probe, run_train
    from sigattn.data.dataset import DataError
    from sigattn.experiments.experiment import ExperimentError
    from sigattn.models.saving import ModelError
    from sigattn.recipes.demo import SettingsError
    from sigattn.recipes.registry import RecipeError
    from sigattn.train.checkpoint import CheckpointError
    from sigattn.train.loop import NonFiniteLossError
except ModuleNotFoundError as missing:
    sys.exit(f"sigattn: the command line needs {missing.name}: pip install 'sigattn[train]'")


def show_info() -> None:
    """Print versions, devices, and which backend serves what and why not the others."""
    print(info.describe())


def train() -> None:
    """Train a recipe: sigattn train NAME --help shows every setting; sigattn recipes lists the names."""


def bench() -> None:
    """Benchmarks, each with the peers in the same run and checked against float64; bench --help lists them."""


COMMANDS: dict[str, Callable[..., None]] = {
    "demo": run_demo,
    "recipes": list_recipes,
    "train": train,
    "evaluate": evaluate,
    "generate": generate,
    "probe": probe,
    "export": export,
    "lm-eval": lm_eval,
    "tokenizer": make_tokenizer,
    "pack": pack_tokens,
    "norms": show_norms,
    "compare": compare_all,
    "reproduce": reproduce,
    "info": show_info,
    "theory": run_theory,
    "bench": bench,
}
# what a user can put right
ERRORS = (
    DataError,
    CheckpointError,
    ModelError,
    NonFiniteLossError,
    RecipeError,
    SettingsError,
    BenchmarkError,
    ExperimentError,
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; what a user got wrong ends in one line and exit code 2."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    commands, program = COMMANDS, "sigattn"
    if arguments[:1] == ["bench"]:
        commands, program, arguments = BENCHMARKS, "sigattn bench", arguments[1:]
    try:
        if program == "sigattn" and arguments[:1] == ["train"]:
            run_train(arguments[1:])
            return
        tyro.extras.subcommand_cli_from_dict(
            commands, prog=program, description=__doc__, args=arguments, config=(tyro.conf.OmitArgPrefixes,)
        )
    except ERRORS as error:
        print(f"sigattn: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
