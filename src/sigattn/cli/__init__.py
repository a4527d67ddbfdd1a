"""Command-line interface: ``sigattn COMMAND --help`` lists the arguments of a command.

Exit codes: 2 for wrong arguments, 1 for files, data or machines that cannot be used, 130 after Ctrl-C and, in training,
143 after SIGTERM. The message of these errors is one line; any other exception is a bug and keeps its traceback.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Sequence

try:
    import tyro

    from sigattn import __version__, info
    from sigattn.bench.provenance import BenchmarkError
    from sigattn.cli.bench import BENCHMARKS
    from sigattn.cli.convert import convert_run
    from sigattn.cli.corpus import make_tokenizer, pack_tokens
    from sigattn.cli.demo import train_demo
    from sigattn.cli.evaluate import evaluate, export, generate, lm_eval, probe
    from sigattn.cli.experiments import check_theory, compare_all, measure_norms, reproduce
    from sigattn.cli.parsing import bind, parse
    from sigattn.cli.recipes import list_recipes
    from sigattn.cli.train import train_recipe
    from sigattn.convert import ConversionError
    from sigattn.data.dataset import DataError
    from sigattn.experiments.experiment import ExperimentError
    from sigattn.files import FileFormatError
    from sigattn.models.saving import ModelError
    from sigattn.optional import MissingPackageError
    from sigattn.recipes.registry import RecipeError
    from sigattn.train.checkpoint import CheckpointError
    from sigattn.train.folder_lock import FolderInUseError
    from sigattn.train.trainer import Interrupted, NonFiniteLossError
    from sigattn.validation import SettingsError

    if importlib.util.find_spec("matplotlib") is None:  # imported only where a figure is drawn, after the training
        raise ModuleNotFoundError(name="matplotlib")
except ModuleNotFoundError as _missing:
    sys.exit(f"sigattn: the command line needs {_missing.name}: pip install 'sigattn[train]'")
except KeyboardInterrupt:
    sys.exit(130)

__all__ = ["main"]


def show_info() -> None:
    """Print versions, devices, and the dtypes that each backend supports, with the reason for each unsupported one."""
    print(info.describe())


def train() -> None:
    """Train a recipe: sigattn train NAME --help lists every setting; sigattn recipes lists the names."""


def bench() -> None:
    """Run a benchmark of the attention on the CPU or GPU; sigattn bench --help lists them."""


COMMANDS: dict[str, Callable[..., object]] = {
    "demo": train_demo,
    "recipes": list_recipes,
    "train": train,
    "evaluate": evaluate,
    "generate": generate,
    "probe": probe,
    "convert": convert_run,
    "export": export,
    "lm-eval": lm_eval,
    "tokenizer": make_tokenizer,
    "pack": pack_tokens,
    "norms": measure_norms,
    "compare": compare_all,
    "reproduce": reproduce,
    "info": show_info,
    "theory": check_theory,
    "bench": bench,
}
DESCRIPTION = (
    "Sigmoid self-attention. ``sigattn COMMAND --help`` lists the arguments of a command, ``sigattn --version`` prints "
    "the version."
)
BENCH_DESCRIPTION = (
    "Benchmarks of the attention on the CPU or GPU. ``sigattn bench NAME --help`` lists the arguments of a benchmark."
)
USAGE_ERRORS = (SettingsError, RecipeError, ExperimentError)
DATA_ERRORS = (
    ConversionError,
    DataError,
    CheckpointError,
    FolderInUseError,
    ModelError,
    NonFiniteLossError,
    BenchmarkError,
    FileFormatError,
    MissingPackageError,
    OSError,
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; the module's docstring lists the exit codes."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        _dispatch(arguments)
    except BrokenPipeError:  # the reader of the output has exited, for example head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (*USAGE_ERRORS, *DATA_ERRORS) as error:
        print(f"sigattn: {_one_line(error)}", file=sys.stderr)
        sys.exit(2 if isinstance(error, USAGE_ERRORS) else 1)
    except Interrupted as stop:
        print(f"\n{stop}\nTo resume: the same command with --resume")
        sys.exit(128 + stop.signal)
    except KeyboardInterrupt:
        sys.exit(130)


def _dispatch(arguments: list[str]) -> None:
    if arguments[:1] == ["train"]:
        train_recipe(arguments[1:])
        return
    if arguments == ["--version"]:
        print(f"sigattn {__version__}")
        return
    commands, program, description = COMMANDS, "sigattn", DESCRIPTION
    if arguments[:1] == ["bench"]:
        commands, program, description = BENCHMARKS, "sigattn bench", BENCH_DESCRIPTION
        arguments = arguments[1:]
    call = parse(
        lambda: tyro.extras.subcommand_cli_from_dict(
            {name: bind(command) for name, command in commands.items()},
            prog=program,
            description=description,
            args=arguments,
            config=(tyro.conf.OmitArgPrefixes,),
        )
    )
    call()


def _one_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    message = " ".join(str(error).split()) or type(error).__name__
    flags = [f"--{name.replace('_', '-')}" for name in error.settings] if isinstance(error, SettingsError) else []
    return f"{message} ({', '.join(flags)})" if flags else message
