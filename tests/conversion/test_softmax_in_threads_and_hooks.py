"""Attention that a model computes outside of a layer's forward in its own thread: replaced, or refused by name."""

import copy
import functools
import queue
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize

from sigattn.conversion import ConversionError, SoftmaxLayer, convert
from tests.conversion.replacing import converted, replace

SDPA = "scaled_dot_product_attention"
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.:DeprecationWarning")
X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
EXAMPLES = pytest.mark.parametrize("example", [None, (X,)], ids=["code", "run"])


def formula(x, bias=-2.0):
    return (x @ x.mT * x.shape[-1] ** -0.5 + bias).sigmoid() @ x


class Fused(nn.Module):
    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x)


class Eager(nn.Module):
    def forward(self, x):
        return (x @ x.mT).softmax(-1) @ x


class Around(nn.Module):
    """Adds a layer's output to that of attention of its own; ``run`` says how the layer is called."""

    def __init__(self, run, inner):
        super().__init__()
        self.run, self.first, self.inner = run, Fused(), inner

    def forward(self, x):
        return self.first(x) + self.run(self.inner, x)


def in_pool(layer, x):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(layer, x).result()


def in_thread(layer, x):
    results = []
    thread = threading.Thread(target=lambda: results.append(layer(x)))
    thread.start()
    thread.join()
    return results[0]


POOL = ThreadPoolExecutor(1)  # its thread is older than the model


def replicated(layer, x):
    """As ``nn.DataParallel``: replicas of a layer, whose parameters are no parameters, in threads."""
    replica = layer._replicate_for_data_parallel()
    return in_thread(replica, x)


RUNS = {
    "new pool": in_pool,
    "old pool": lambda layer, x: POOL.submit(layer, x).result(),
    "thread": in_thread,
    "replica": replicated,
    "partial": lambda layer, x: POOL.submit(functools.partial(layer, x=x)).result(),
    "method": lambda layer, x: POOL.submit(layer.forward, x).result(),
    "fork": lambda layer, x: torch.jit.wait(torch.jit.fork(layer, x)),  # runs it in the same thread
    "copy": lambda layer, x: in_thread(copy.deepcopy(layer), x),
}


@EXAMPLES
@pytest.mark.parametrize("run", RUNS)
def test_layers_that_run_in_threads_are_replaced(run, example):
    model = Around(RUNS[run], Fused())
    report = replace(model, example, bias=-2.0)
    assert [r.name for r in report] == ["first", "inner"]
    torch.testing.assert_close(model(X), 2 * formula(X))


@pytest.mark.parametrize("run", RUNS)
def test_softmax_of_layers_that_run_in_threads_is_replaced_or_refused(run):
    """A run does not see in which thread a layer's replica, copy or method is called."""
    model = Around(RUNS[run], Eager())
    with pytest.raises(ValueError, match=r"cannot be replaced: 'inner' \(Eager: softmax\)"):
        replace(model, None)
    if run in ("replica", "method", "copy"):
        with pytest.raises(ValueError, match=r"cannot be replaced: 'inner' \(Eager: softmax\)"):
            replace(model, (X,))
    else:
        replace(model, (X,), bias=-2.0)
        torch.testing.assert_close(model(X), formula(X) + (X @ X.mT - 2).sigmoid() @ X)


@pytest.mark.parametrize("run", ["new pool", "old pool", "thread"])
def test_convert_fits_layers_that_run_in_threads(run):
    alone, threaded = Around(lambda layer, x: layer(x), Fused()), Around(RUNS[run], Fused())
    batches = list(torch.randn(4, 2, 1, 5, 8))
    reports = [convert(model, batches) for model in (alone, threaded)]
    assert reports[0].layers == reports[1].layers
    torch.testing.assert_close(threaded(batches[0]), alone(batches[0]))


def eager(q, k, v):
    return (q @ k.mT).softmax(-1) @ v


class FunctionInThread(nn.Module):
    """Attention in this thread and in another: only the first would become sigmoid attention."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        with ThreadPoolExecutor(1) as pool:
            return F.scaled_dot_product_attention(x, x, x) + pool.submit(self.function, x, x, x).result()


class HeldPool(FunctionInThread):
    def __init__(self, function):
        super().__init__(function)
        self.pool = POOL

    def forward(self, x):
        return sum(self.pool.map(lambda y: self.function(y, y, y), [x, x]))


class PlainThread(FunctionInThread):
    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x) + in_thread(lambda y: self.function(y, y, y), x)


@EXAMPLES
@pytest.mark.parametrize("function", [F.scaled_dot_product_attention, functools.partial(eager)])
@pytest.mark.parametrize("kind", [FunctionInThread, HeldPool, PlainThread])
def test_functions_that_run_in_threads_are_refused(kind, function, example):
    with pytest.raises(ValueError, match=rf"cannot be replaced: '1' \({kind.__name__}: "):
        replace(nn.Sequential(Fused(), kind(function)), example)


class Worker:
    """A thread that waits for work, which is not to be seen in the code of a layer."""

    def __init__(self):
        self.tasks, self.results = queue.SimpleQueue(), queue.SimpleQueue()
        threading.Thread(target=self.loop, daemon=True).start()

    def loop(self):
        while task := self.tasks.get():
            self.results.put(task())


class ByWorker(nn.Module):
    def __init__(self):
        super().__init__()
        self.worker = Worker()

    def forward(self, x):
        self.worker.tasks.put(lambda: F.scaled_dot_product_attention(x, x, x))
        return self.worker.results.get()


class Sometimes(Fused):
    def forward(self, x, skip=True):
        return x if skip else super().forward(x)


@pytest.mark.parametrize("kind", [ByWorker, Sometimes])
def test_attention_that_the_example_does_not_call_is_named(kind):
    model = nn.Sequential(Fused(), kind())
    expected = [converted("0", "Fused", SDPA), SoftmaxLayer("1", kind.__name__, SDPA, "not called")]
    assert replace(model, (X,)) == expected
    with pytest.raises(ConversionError, match=rf"do not reach the attention of '1' \({kind.__name__}: "):
        convert(nn.Sequential(Fused(), kind()), list(torch.randn(2, 1, 1, 5, 8)))


def attend_in_hook(module, inputs, output):
    return F.scaled_dot_product_attention(output, output, output)


def eager_in_hook(module, inputs, output):
    return (output @ output.mT).softmax(-1) @ output


def attend_before(module, inputs):
    return (F.scaled_dot_product_attention(inputs[0], inputs[0], inputs[0]),)


class OwnHook(nn.Module):
    """Its hook is a method that was bound before the conversion."""

    def __init__(self):
        super().__init__()
        self.register_forward_hook(self.attend)

    def attend(self, module, inputs, output):
        return F.scaled_dot_product_attention(output, output, output)

    def forward(self, x):
        return x


def with_hook(hook, *, before=False):
    layer = nn.Identity()
    (layer.register_forward_pre_hook if before else layer.register_forward_hook)(hook)
    return layer


HOOKS = {
    "forward": lambda: with_hook(attend_in_hook),
    "forward, partial": lambda: with_hook(functools.partial(attend_in_hook)),
    "before": lambda: with_hook(attend_before, before=True),
    "method": OwnHook,
}


@pytest.mark.parametrize("hook", HOOKS)
class TestHooks:
    def test_attention_in_a_hook_is_refused_without_an_example(self, hook):
        with pytest.raises(ValueError, match=rf"'1' \(\w+: {SDPA} in a hook\).*pass example"):
            replace(nn.Sequential(Fused(), HOOKS[hook]()))

    def test_with_one_the_layer_around_replaces_it(self, hook):
        model = nn.Sequential(Around(lambda layer, x: layer(x), nn.Sequential(HOOKS[hook]())))
        report = replace(model, (X,), bias=-2.0)
        assert [r.name for r in report if r.outcome == "converted"] == ["0", "0.first"]
        torch.testing.assert_close(model(X), 2 * formula(X))

    @EXAMPLES
    def test_attention_in_a_hook_of_the_whole_model_is_refused(self, hook, example):
        model = nn.Sequential(Fused(), nn.Identity())
        before = hook == "before"
        function = {"before": attend_before, "method": OwnHook().attend}.get(hook, attend_in_hook)
        (model.register_forward_pre_hook if before else model.register_forward_hook)(function)
        with pytest.raises(ValueError, match=rf"'' \(Sequential: {SDPA} in a hook\)"):
            replace(model, example)


@EXAMPLES
@pytest.mark.parametrize("outermost", [False, True])
def test_softmax_in_a_hook_is_refused(outermost, example):
    model = nn.Sequential(Fused(), nn.Identity())
    (model if outermost else model[1]).register_forward_hook(eager_in_hook)
    with pytest.raises(ValueError, match=r"\w+: softmax in a hook\)"):
        replace(model, example)


class Stack(nn.Sequential):
    def forward(self, x):
        return super().forward(F.scaled_dot_product_attention(x, x, x))


class Projected(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(8))

    def forward(self, x):
        return F.scaled_dot_product_attention(x @ self.weight, x, x)


@EXAMPLES
def test_attention_of_a_container_and_in_a_parametrization_is_refused(example):
    """A container would run its bias as one of its layers."""
    with pytest.raises(ValueError, match=rf"cannot be replaced: '1' \(Stack: {SDPA}\). A container would run its bias"):
        replace(nn.Sequential(Fused(), Stack(nn.Identity())), example, bias=-2.0)
    layer = nn.Linear(8, 8)
    parametrize.register_parametrization(layer, "weight", Eager())
    with pytest.raises(ValueError, match=r"'1\.parametrizations\.weight\.0' \(Eager: softmax\)"):
        replace(nn.Sequential(Fused(), layer), example)


@EXAMPLES
def test_a_hook_that_only_reads_softmax_and_parametrized_weights_stay(example):
    model, seen = nn.Sequential(parametrizations.weight_norm(Projected()), nn.Identity()), []
    model[1].register_forward_hook(lambda module, inputs, output: seen.append(output.softmax(-1)))
    report = replace(model, example, bias=-2.0)
    assert {r.call: r.outcome for r in report} == {SDPA: "converted", "softmax in a hook": "not attention"}
    torch.testing.assert_close(model(X), formula(X))
