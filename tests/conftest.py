"""Every test runs with the annotations of sigattn checked at run time, shapes included."""

import dataclasses
import gc
import importlib.util
import os
import pickle
import sys
from concurrent.futures import Future
from pathlib import Path

import pytest

_THREADS_ARE_GIVEN = "OMP_NUM_THREADS" in os.environ
os.environ.setdefault("OMP_NUM_THREADS", "2")

# Left out: functions whose own message for an argument of a wrong type the checker's would hide; kernels, because
# Triton reads the source; and what torch.compile traces, which cannot follow the checker, not even where it is switched
# off.
LEFT_OUT = {
    *(f"sigattn.ops.{name}" for name in ("attention", "custom_ops", "kvcache", "problem", "validation", "varlen")),
    *(f"sigattn.ops.{name}" for name in ("broadcasting", "nested", "reference", "scalars", "vmap")),
    *(f"sigattn.ops.triton.{name}" for name in ("activation", "backward", "decode", "forward")),
    *(f"sigattn.ops.triton.{name}" for name in ("rows", "scores", "tile")),
    *(f"sigattn.ops.hopper.{name}" for name in ("backward", "backward_fused", "common", "forward")),
    *(f"sigattn.flash.{name}" for name in ("dense", "kvcache", "padding", "validation", "varlen")),
    "sigattn.nn.functional",
    *(f"sigattn.nn.{name}" for name in ("multihead", "sigmoid_layer", "visible_keys", "written_softmax")),
    *(f"sigattn.integrations.transformers.{name}" for name in ("configured", "interface")),
    "sigattn.theory.contextual_mapping",
    "sigattn.ops.settings",
    "sigattn.ops.statistics",
}
_src = Path(__file__).parent.parent / "src"
_modules = {".".join(f.relative_to(_src).with_suffix("").parts) for f in _src.rglob("[!_]*.py")}

assert _modules >= LEFT_OUT, f"no such modules: {LEFT_OUT - _modules}"
assert "sigattn" not in sys.modules, "sigattn must be imported through the hook"
# Processes that compile kernels (ops/compiled) call what others call, and with checks take 15 seconds longer
_compiles = os.environ.get("TRITON_INTERPRET") == "0"
_has_checker = importlib.util.find_spec("jaxtyping") and importlib.util.find_spec("beartype")  # a GPU machine may not
if _has_checker and not _compiles:
    from jaxtyping import install_import_hook

    from tests import annotations  # noqa: F401

    _hook = install_import_hook(["experiments", "benchmarks", *sorted(_modules - LEFT_OUT)], "beartype.beartype")

import torch  # noqa: E402

from benchmarks.compatibility import torchvision_apart  # noqa: E402, F401

# without a GPU, torch.manual_seed takes a millisecond: it formats the stack, for each device that it does not find
_generators = torch if torch.cuda.is_available() else torch.default_generator
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels run as Python; to be said before Triton loads


def pytest_configure(config):
    """Let each worker process compute with one thread: with more threads than cores, they wait for one another.

    Workers inherit the environment of the process that starts them, which has loaded this file as well.
    """
    if getattr(config.option, "numprocesses", None) and not _THREADS_ARE_GIVEN:
        os.environ["OMP_NUM_THREADS"] = "1"


def pytest_collection_finish():
    """Keep what has been imported out of garbage collections: torch.compiler.reset runs one, for seconds otherwise."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _keep_imports_out_of_garbage_collections():
    """As above, for what the tests of a module have imported."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture
def unchecked():
    """Without checks of annotations: the compiler does not see through them."""
    jaxtyping = pytest.importorskip("jaxtyping")
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def _speed_up(interpreter):
    """Let Triton's interpreter do once per launch what it does at every call of a device function, or to no effect.

    These are: to replace the functions of the language again, and to compute integers once more in 64 bits for a check
    of overflows that only ``debug=True`` makes. Without this the tests of interpreted kernels take 2.3 times as long.
    """
    patch_lang, launch, patched = interpreter._patch_lang, interpreter.GridExecutor.__call__, set()

    def patch_once(fn):
        if id(fn.__globals__) in patched:
            return None
        patched.add(id(fn.__globals__))
        return patch_lang(fn)

    def launch_with_new_patches(self, *args, **kwargs):
        patched.clear()
        try:
            return launch(self, *args, **kwargs)
        finally:
            patched.clear()

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_once, launch_with_new_patches
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    interpreter.is_sped_up = True


@pytest.fixture(autouse=True)
def _fresh_state():
    """Seed PyTorch's generator, and forget the warnings given and the calls prepared before this test."""
    from sigattn.nn import guide
    from sigattn.ops import call_cache

    _generators.manual_seed(0)
    guide.warn_once.cache_clear()
    call_cache.clear()
    if (tuning := sys.modules.get("sigattn.ops.triton.tuning")) is not None:
        tuning._taken.clear()
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter is not None and not hasattr(interpreter, "is_sped_up"):
        _speed_up(interpreter)


class _InThisProcess:
    """An executor that makes each call when it is submitted, after the way through pickle that a process asks for."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def submit(self, *call):
        function, *arguments = pickle.loads(pickle.dumps(call))
        future = Future()
        future.set_result(function(*arguments))
        return future


@pytest.fixture
def in_this_process(monkeypatch):
    """Train without worker processes, whose imports take longer than small runs."""
    from experiments import workers

    threads = torch.get_num_threads()
    monkeypatch.setattr(workers, "worker_pool", lambda _: _InThisProcess())
    yield
    torch.set_num_threads(threads)
