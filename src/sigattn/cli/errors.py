"""Exit codes and messages of the errors of a command.

Exit codes: 2 for wrong arguments, 1 for files, data or machines that cannot be used, 130 after Ctrl-C and, in training,
143 after SIGTERM. The message of these errors is one line; any other exception is a bug and keeps its traceback.
"""

import codecs
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from sigattn.train.loop import Interrupted
from sigattn.validation import SettingsError, UserError

MEMORY_ADVICE = (
    "lower the size of batches, models or sequences, or the number of workers; in training, grad_accum_steps and "
    "checkpoint_activations lower what a batch takes"
)
# of the texts of --help and of reports, for a terminal without Unicode
IN_ASCII = {"σ": "sigma", "α": "alpha", "κ": "kappa", "μ": "mu", "√": "sqrt", "·": "*", "•": "-", "−": "-", "→": "->"}
IN_ASCII |= {"±": "+-", "²": "^2", "‖": "|", "…": "..."}


def _spell_in_ascii(error: UnicodeError) -> tuple[str, int]:
    """Return characters that an encoding lacks in ASCII; ? for those without a spelling."""
    assert isinstance(error, UnicodeEncodeError)
    missing = error.object[error.start : error.end]
    return "".join(IN_ASCII.get(character, "?") for character in missing), error.end


codecs.register_error("sigattn-ascii", _spell_in_ascii)


@contextmanager
def exit_on_errors(program: str) -> Iterator[None]:
    """Exit with a code and one line for the errors of a command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="sigattn-ascii")
    try:
        yield
    except BrokenPipeError:  # the reader of the output has exited, for example head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (UserError, OSError) as error:
        print(f"{program}: {_one_line(error)}", file=sys.stderr)
        sys.exit(2 if isinstance(error, SettingsError) else 1)
    except Interrupted as stop:
        print(f"\n{stop}\nTo resume: the same command with --resume")
        sys.exit(128 + stop.signal)
    except KeyboardInterrupt:
        sys.exit(130)
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        print(f"{program}: out of memory ({_one_line(error)}): {MEMORY_ADVICE}", file=sys.stderr)
        sys.exit(1)


def _is_out_of_memory(error: BaseException) -> bool:
    """Return True for errors of Python and CUDA, and of PyTorch where they have no class of their own."""
    # of the allocator on a CPU, and of a process that reads data and was killed
    texts = ("can't allocate memory", "Storage size calculation overflowed", "DataLoader worker")
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(text in str(error) for text in texts)


def _one_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    message = " ".join(str(error).split()) or type(error).__name__
    flags = [f"--{name.replace('_', '-')}" for name in error.settings] if isinstance(error, SettingsError) else []
    return f"{message} ({', '.join(flags)})" if flags else message
