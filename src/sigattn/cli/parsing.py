"""Parsing of a command's arguments."""

import contextlib
import dataclasses
import functools
import inspect
import io
import shutil
import textwrap
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from sigattn.validation import SettingsError

Parsed = TypeVar("Parsed")
_paths = ConstructorRegistry()


@_paths.primitive_rule
def _path_rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Path] | None:
    """Return tyro's rule for paths, but refuse an empty one, which Python takes for the current folder."""
    if info.type is not Path:
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="PATH",
        instance_from_str=lambda texts: _path(texts[0]),
        is_instance=lambda value: isinstance(value, Path),
        str_from_instance=lambda path: [str(path)],
    )


def _path(text: str) -> Path:
    if not text:
        raise SettingsError("a path is empty (''): name a file or folder; the current folder is '.'")
    return Path(text)


def parse(parser: Callable[[], Parsed]) -> Parsed:
    """Call a parser of tyro; raise SettingsError if a configuration rejects its arguments (tyro prints a box).

    Exits for --help, and for arguments that tyro rejects.
    """
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            with _paths:
                return parser()
        except SystemExit as stop:
            cause: BaseException | None = stop
            while cause is not None and not isinstance(cause, SettingsError):
                cause = cause.__context__
    if cause is not None:
        raise cause
    with _paths:
        return parser()  # parse again to print the output that was suppressed in the first call


def wrap(text: str) -> str:
    """Break the lines of a description between words at the width of the terminal, which tyro does not.

    The indent keeps tyro from joining them again.
    """
    fill = textwrap.TextWrapper(shutil.get_terminal_size().columns, subsequent_indent="  ", break_on_hyphens=False).fill
    return "\n".join(map(fill, text.splitlines()))


def run_command(
    commands: Mapping[str, Callable[..., object]] | Callable[..., object],
    arguments: Sequence[str],
    program: str,
    description: str | None = None,
) -> None:
    """Parse the arguments of a program that is one command or has several by name, and run the command."""
    settings: dict[str, Any] = {"prog": program, "description": description and wrap(description), "args": arguments}
    settings["config"] = (tyro.conf.OmitArgPrefixes,)
    if callable(commands):
        call = parse(lambda: tyro.cli(_bind(commands), **settings))
    else:
        bound = {name: _bind(command) for name, command in commands.items()}
        call = parse(lambda: tyro.extras.subcommand_cli_from_dict(bound, **settings))
    call()


def _bind(command: Callable[..., object]) -> Callable[..., Any]:
    """Return a function with the command's signature that returns the command bound to its arguments.

    Parameters that are configurations lose their names, which --help would show in the titles of groups of options.
    """
    bound: Any = functools.update_wrapper(lambda *args, **kwargs: functools.partial(command, *args, **kwargs), command)
    bound.__signature__ = inspect.signature(command)
    del bound.__wrapped__  # from which tyro would read the annotations
    unnamed = tyro.conf.arg(name="")
    hints = typing.get_type_hints(command, include_extras=True)
    bound.__annotations__ = {n: Annotated[h, unnamed] if dataclasses.is_dataclass(h) else h for n, h in hints.items()}
    return cast(Callable[..., Any], bound)
