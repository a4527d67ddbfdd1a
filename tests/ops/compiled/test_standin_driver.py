"""The stand-in driver rejects what a driver would reject, and restores all state."""

import pytest
import torch
from triton.runtime import driver

from sigattn import sigmoid_attention
from sigattn.ops.problem import Problem
from sigattn.ops.triton import kernel_args, launch, launch_cache
from sigattn.ops.triton.forward import fwd_kernel
from tests.ops import standin_driver


def problem(n=20, dtype=torch.float32):
    return Problem(*(torch.zeros(1, n, 2, 16, dtype=dtype).transpose(1, 2) for _ in range(3)))


def test_launches_are_recorded_and_others_than_those_compiled_for_are_refused():
    """Each kind of specialisation: alignment, divisibility, constants, dtypes, and the size of the grid."""
    architecture, active, p = kernel_args.architecture, driver._active, problem()
    with standin_driver.gpu(80) as launched:
        sigmoid_attention(p.query, p.key, p.value, backend="triton")
        (first,) = launched
        assert (first.name, first.grid[1:]) == ("fwd_kernel", (1, 1))
        assert first.arguments["query"].data_ptr() == p.query.data_ptr()
        assert 0 < first.binary.shared <= standin_driver.SHARED[80]
        start = first.compiled[first.grid]
        start(*first.arguments.values())
        misaligned = torch.zeros(p.query.numel() + 1)[1:].view(p.query.shape)
        for name, value in {
            "query": misaligned,
            "key": p.key.bfloat16(),
            "key_strides": first.arguments["key_strides"]._replace(h=17),
            "query_strides": first.arguments["query_strides"]._replace(d=2),
            "len_q": 1 << 31,
            "OPT": first.options._replace(DV=8),
        }.items():
            with pytest.raises(standin_driver.LaunchError, match=rf"argument {name}[ \[]"):
                start(*{**first.arguments, name: value}.values())
        for grid in ((0, 1, 1), (1, 65536, 1), (1 << 31, 1, 1)):
            with pytest.raises(standin_driver.LaunchError, match="grid"):
                first.compiled[grid](*first.arguments.values())
        assert len(launched) == 2
        with standin_driver.gpu(89, compiles=False) as other:
            launch.forward(p)
        assert other[0].device != first.device
    assert not {first.device, other[0].device} & fwd_kernel.device_caches.keys()
    assert kernel_args.architecture is architecture
    assert driver._active is active
    assert not launch_cache._cache
    with pytest.raises(ValueError, match="not for cpu"):
        sigmoid_attention(p.query, p.key, p.value, backend="triton")
