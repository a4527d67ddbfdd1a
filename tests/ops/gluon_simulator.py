"""Simulator of Gluon kernels: partitions, TMA and tensor cores run concurrently, in any order that a GPU permits.

The functions of a kernel run unchanged with another ``gl``. Operations that are asynchronous on the GPU are executed at
a time chosen by a seeded generator, at the latest at their wait: a product reads shared memory when it is executed, not
when it is issued. A buffer overwritten too early, a wait for the wrong phase of a barrier, or a value used before its
wait therefore causes a wrong number, an error or a deadlock. New memory is NaN.
"""

import functools
import random
import threading
import types

import torch


class DeadlockError(Exception):
    """All partitions wait, and no operation is pending."""


class Value:
    shape = property(lambda self: list(self.data.shape))
    dtype = property(lambda self: self.data.dtype)
    type = types.SimpleNamespace(layout=None)

    def __init__(self, data):
        self.data = data

    def __neg__(self):
        return Value(-self.data)

    def __getitem__(self, at):
        return Value(self.data[at])

    def to(self, dtype, bitcast=False):
        return Value(self.data.contiguous().view(dtype) if bitcast else self.data.to(dtype))


def _raw(x):
    if isinstance(x, Pending):
        raise AssertionError("the result of a product is used before it was waited for")
    if type(x).__name__ == "constexpr":
        return x.value
    return x.data if isinstance(x, Value) else x


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "le", "lt", "ge", "eq", "truediv"):
    _operator = f"__{_name}__"
    setattr(Value, _operator, lambda self, other, name=_operator: Value(getattr(self.data, name)(_raw(other))))


class Shared:
    """Shared memory; all views of an allocation share its data."""

    def __init__(self, data):
        self.data = data

    def reshape(self, shape):
        return Shared(self.data.view(shape))

    def permute(self, order):
        return Shared(self.data.permute(order))

    def slice(self, start, length, axis):
        return Shared(self.data.narrow(axis, start, length))

    def load(self, _layout):
        return Value(self.data.clone())

    def store(self, value):
        self.data.copy_(_raw(value))

    def index(self, i):
        assert 0 <= i < len(self.data), f"slot {i} of {len(self.data)}"
        return self.data[i] if isinstance(self.data, list) else Shared(self.data[i])


class Pointer:
    """A pointer to an entry of a tensor."""

    def __init__(self, tensor, offset=0):
        self.tensor, self.offset = tensor, offset

    def __add__(self, step):
        return Pointer(self.tensor, self.offset + _raw(step))

    def load(self, mask=None, other=0.0):
        at, memory = torch.as_tensor(self.offset), self._memory()
        inside = torch.ones_like(at, dtype=torch.bool) if mask is None else mask.data
        return Value(torch.where(inside, memory[torch.where(inside, at, 0)], other).to(memory.dtype))

    def store(self, value, mask):
        self._memory()[self.offset[mask.data]] = value.data[mask.data]

    def _memory(self):
        size = self.tensor.untyped_storage().nbytes() // self.tensor.element_size() - self.tensor.storage_offset()
        return self.tensor.as_strided((size,), (1,))


class Barrier:
    def __init__(self):
        self.count = self.left = self.bytes = self.phase = 0

    def settle(self, arrivals=0, size=0):
        self.left -= arrivals
        self.bytes += size
        assert self.left >= 0, "more arrivals than the barrier was made for"
        if self.left == 0 and self.bytes == 0:
            self.left, self.phase = self.count, self.phase ^ 1


class Pending:
    """A pending product: an accumulator of the tensor cores."""

    def __init__(self, run, shape):
        self.run, self.shape, self.data = run, shape, None

    def finish(self):
        if self.data is None:
            self.data = self.run()


class Descriptor:
    def __init__(self, tensor, block):
        self.tensor, self.block, self.dtype, self.layout = tensor, block, tensor.dtype, None

    def read(self, at):
        out = torch.zeros(self.block, dtype=self.dtype)
        there, here = self._overlap(at)
        out[here] = self.tensor[there]
        return out

    def write(self, at, data, add=False):
        assert min(at) >= 0, "TMA stops the kernel if a tile that it writes begins at a negative index"
        there, here = self._overlap(at)
        self.tensor[there] = data[here] + (self.tensor[there] if add else 0)

    def _overlap(self, at):
        sizes = [max(0, min(b, n - a)) for a, b, n in zip(at, self.block, self.tensor.shape, strict=True)]
        return tuple(slice(a, a + s) for a, s in zip(at, sizes, strict=True)), tuple(slice(0, s) for s in sizes)


class Simulator:
    """Simulation of one program of a kernel at a time.

    Args:
        seed: seed of the order of events.
        lazy: execute asynchronous operations only when they must have completed.
    """

    def __init__(self, seed, *, lazy):
        self.random, self.lazy = random.Random(seed), lazy
        self.actions = []  # copies under way
        self.program = self.programs = 0
        self.failed = None
        self.turns = {}  # by thread: released when it may run; one thread runs at a time
        self.waiting = {}  # by thread: whether it is ready
        self.products = {}  # by thread
        self.stores = {}  # issued, by thread

    # -- whose turn it is ---------------------------------------------------------------------------------------------

    def pause(self, ready=lambda: True):
        """Yield to the other partitions; return when this one is scheduled again and ready."""
        me = threading.current_thread()
        if me not in self.turns:  # before partitions are split
            while not ready():
                self._act()
            return
        self.waiting[me] = ready
        self._pass_turn()
        self._take_turn()

    def _take_turn(self):
        me = threading.current_thread()
        self.turns[me].acquire()
        del self.waiting[me]
        if self.failed:
            raise SystemExit

    def _pass_turn(self):
        """Let a partition that is ready run next; all of them, which then end, if one has failed."""
        if self.actions and not self.lazy and self.random.random() < 0.5:
            self._act()
        while not self.failed and self.waiting:
            able = [t for t, ready in self.waiting.items() if ready()]
            if able:
                self.turns[self.random.choice(able)].release()
                return
            try:
                self._act()
            except DeadlockError as error:
                self.failed = error
        for t in list(self.waiting):
            self.turns[t].release()

    def _act(self):
        if not self.actions:
            raise DeadlockError("all partitions wait, and nothing is under way")
        # late stores complete as late as possible: only a reuse of their buffer waits for them
        stores = [action for own in self.stores.values() for action in own]
        loads = [at for at, action in enumerate(self.actions) if action not in stores]
        able = loads if loads and self.lazy else range(len(self.actions))
        self.actions.pop(self.random.choice(able))()

    def split(self, parts):
        """Run the partitions concurrently to completion."""

        def body(function, arguments):
            try:
                self._take_turn()
                function(*arguments)
            except SystemExit:
                return
            except BaseException as error:
                self.failed = error
            self._pass_turn()

        threads = [threading.Thread(target=body, args=part, daemon=True) for part in parts]
        self.turns = {t: threading.Semaphore(0) for t in threads}
        self.waiting = dict.fromkeys(threads, lambda: True)
        self.products, self.stores = {t: [] for t in threads}, {}
        for thread in threads:
            thread.start()
        self._pass_turn()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "the simulation does not end"
        assert self.failed or all(p.data is not None for own in self.products.values() for p in own)
        self.turns = {}
        if self.failed:
            raise self.failed

    # -- what kernels call --------------------------------------------------------------------------------------------

    def wait(self, barrier, phase, pred=True):
        self.pause(lambda: not pred or barrier.phase != phase)

    def expect(self, barrier, size):
        barrier.settle(arrivals=1, size=size)
        self.pause()

    def arrive(self, barrier):
        barrier.settle(arrivals=1)
        self.pause()

    def init(self, barrier, count):
        barrier.count = barrier.left = count

    def load(self, descriptor, at, barrier, slot):
        def copy():
            data = descriptor.read(at)
            slot.data.copy_(data)
            barrier.settle(size=-data.numel() * data.element_size())

        self.actions.append(copy)
        self.pause()

    def store(self, descriptor, at, slot, add=False):
        own = self.stores.setdefault(threading.current_thread(), [])

        def copy():
            descriptor.write(at, slot.data, add)

        own.append(copy)
        self.actions.append(copy)
        self.pause()

    def store_wait(self, pendings):
        own = self.stores.setdefault(threading.current_thread(), [])
        due = own[: max(0, len(own) - pendings)]
        self.pause(lambda: not any(copy in self.actions for copy in due))

    def mma(self, a, b, acc, use_acc=True, is_async=False):
        assert is_async
        shape = a.data.shape[0], b.data.shape[1]
        if use_acc and not isinstance(acc, Value):
            assert isinstance(acc, Pending)
            assert acc.data is not None or acc.shape == shape, "an accumulator of another shape is under way"
        left = a.data  # of registers; of shared memory it is a view, read when the product happens
        result = Pending(lambda: left.float() @ b.data.float() + (acc.data if use_acc else 0), shape)
        own = self.products[threading.current_thread()]
        own.append(result)
        if not self.lazy:
            for p in own[: self.random.randrange(len(own) + 1)]:
                p.finish()
        self.pause()
        return result

    def mma_wait(self, outstanding, deps):
        me = threading.current_thread()
        own = self.products[me]
        done, self.products[me] = own[: len(own) - outstanding], own[len(own) - outstanding :]
        for p in done:
            p.finish()
        results = [Value(d.data) if isinstance(d, Pending) and d not in self.products[me] else d for d in deps]
        self.pause()
        return results[0] if len(results) == 1 else tuple(results)

    def allocate(self, dtype, shape, _=None):
        if dtype is torch.int64:
            return Shared([Barrier() for _ in range(shape[0])])
        return Shared(torch.full(shape, torch.nan, dtype=dtype))

    def namespace(self):
        """Return the simulated namespace of a kernel's module, including inline assembly functions."""

        def least(a, b, propagate_nan=None):
            if not isinstance(a, Value):
                return min(a, b)
            bound = torch.tensor(b, dtype=a.dtype)  # a GPU's minimum ignores NaN by default
            return Value((torch.fmin if propagate_nan is None else torch.minimum)(a.data, bound))

        def called(name):  # a function of PyTorch on numbers in registers
            return lambda x, *args: Value(getattr(torch, name)(_raw(x), *args))

        layouts = "NVMMADistributedLayout", "NVMMASharedLayout", "SliceLayout", "DotOperandLayout"
        nothing = dict.fromkeys(layouts, lambda *_, **__: None)
        gl = types.SimpleNamespace(
            **nothing, **{name: called(name) for name in ("exp2", "sum", "reshape", "permute")},
            **{name: getattr(torch, name) for name in ("int32", "int64", "float32")},
            constexpr=lambda x: x, static_range=range, static_assert=lambda condition: None, minimum=least, maximum=max,
            program_id=lambda _: self.program, num_programs=lambda _: self.programs, cdiv=lambda a, b: -(-a // b),
            load=lambda pointer, mask=None, other=0.0: pointer.load(mask, other),
            store=lambda pointer, value, mask: pointer.store(value, mask),
            zeros=lambda shape, dtype, layout: Value(torch.zeros(shape, dtype=dtype)),
            arange=lambda start, stop, layout: Value(torch.arange(start, stop)),
            where=lambda c, a, b: Value(torch.where(_raw(c), _raw(a), _raw(b))),
            split=lambda x: tuple(Value(t) for t in _raw(x).unbind(-1)),
            join=lambda a, b: Value(torch.stack((_raw(a), _raw(b)), -1)),
            convert_layout=lambda x, layout, assert_trivial=False: Value(_raw(x)),
            allocate_shared_memory=self.allocate, warp_specialize=lambda parts, warps, registers: self.split(parts),
            PropagateNan=types.SimpleNamespace(ALL=True),
        )  # fmt: skip
        mbarrier = types.SimpleNamespace(
            init=self.init, wait=self.wait, expect=self.expect, arrive=self.arrive, MBarrierLayout=lambda: None
        )
        tma = types.SimpleNamespace(
            async_copy_global_to_shared=self.load, async_copy_shared_to_global=self.store, store_wait=self.store_wait
        )
        return {
            "gl": gl, "tl": gl,  # in functions of the portable kernels
            "mbarrier": mbarrier, "tma": tma, "warpgroup_mma": self.mma, "warpgroup_mma_init": lambda x: x,
            "warpgroup_mma_wait": self.mma_wait, "fence_async_shared": self.pause,
            "special_reciprocal": called("reciprocal"), "add_by_tma": functools.partial(self.store, add=True),
        }  # fmt: skip

    def run(self, module, kernel, programs, **arguments):
        """Run a kernel of a module, one program after another."""
        simulated, worlds = self.namespace(), {}

        def world(names):
            """Return the simulated namespace of a module, and of the modules of the functions that it calls."""
            if id(names) not in worlds:
                worlds[id(names)] = {**names, **simulated}
                for name, called in names.items():
                    if type(called).__name__ == "GluonJITFunction" and name not in simulated:
                        f, there = called.fn, world(called.fn.__globals__)
                        worlds[id(names)][name] = types.FunctionType(f.__code__, there, name, f.__defaults__)
            return worlds[id(names)]

        arguments = {name: Pointer(x) if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}
        names = world(vars(module))
        self.programs = programs
        for self.program in range(programs):
            names[kernel](**arguments)
            assert not self.actions, "copies are under way at the end of the program"
