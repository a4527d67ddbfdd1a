"""Context-parallel attention in several processes, compared on each with attention over the whole sequence."""

import os
import sys
import time
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from sigattn import backend, sigmoid_attention
from sigattn.distributed.sequence_sharding import SequenceSharding
from sigattn.distributed.sharded_attention import ContextParallelShard, context_parallel, context_parallel_attention
from sigattn.distributed.sharded_cache import sharded_cache_attention
from sigattn.flash import flash_attn_with_kvcache
from sigattn.models.language import LanguageModel, LanguageModelConfig
from sigattn.models.transformer import recording

CASES = [
    {},
    {"is_causal": True, "n": 37, "bias": -2.0, "heads": (4, 2)},
    {"n": 5, "bias": "head"},
    {"is_causal": True, "n": 41, "bias": "query", "window": (6, -1)},
    {"is_causal": True, "n": 30, "softcap": 0.6, "balanced": False},
    {"window": (1, 1), "n": 24, "scale": 0.3, "balanced": True},  # only the border of a neighbour's segment is visible
    {"lengths": True, "n": 33, "is_causal": True},
    {"normalize": True, "is_causal": True, "n": 37, "heads": (4, 1), "bias": "head", "alibi": True},
    {"normalize": True, "lengths": True, "n": 33, "bias": -200.0, "window": (5, 3)},
    {"normalize": True, "lengths": True, "n": 9},
    {"dtype": torch.bfloat16, "is_causal": True, "n": 64, "heads": (4, 2)},
]


DEFAULTS = {"is_causal": False, "scale": None, "window": None, "softcap": 0.0, "normalize": False, "bias": None}
DEFAULTS |= {"n": 24, "heads": (2, 2), "balanced": None, "lengths": False, "alibi": False, "dtype": torch.float64}


def check(mesh, case):
    rank, ranks, case = mesh.get_local_rank(), mesh.size(), {**DEFAULTS, **case}
    n, (hq, hkv), dtype, bias = (case[name] for name in ("n", "heads", "dtype", "bias"))
    g = torch.Generator().manual_seed(n)

    def randn(*shape):
        return torch.randn(shape, generator=g, dtype=torch.float64).to(dtype)

    sharding = SequenceSharding(n, ranks, case["is_causal"] if case["balanced"] is None else case["balanced"])
    q, k, v, grad = randn(2, hq, n, 8), randn(2, hkv, n, 8), randn(2, hkv, n, 6), randn(2, hq, n, 6)
    if isinstance(bias, str):
        bias = (randn(1, hq, 1, 1) if bias == "head" else randn(2, 1, n, 1)) - 1
    slopes = randn(hq).abs() / 8 if case["alibi"] else None
    options = {name: case[name] for name in ("is_causal", "scale", "window", "softcap", "normalize")}
    options |= {"enable_gqa": True, "key_lengths": torch.tensor([n, n // 2]) if case["lengths"] else None}
    tensors = {"query": q, "key": k, "value": v, "bias": bias, "alibi_slopes": slopes}
    options |= {name: t for name, t in tensors.items() if not isinstance(t, torch.Tensor)}
    tensors = {name: t for name, t in tensors.items() if name not in options}
    sharded = {"output", "query", "key", "value", *(["bias"] if case["bias"] == "query" else [])}

    def local(name, t):
        return sharding.shard(t, rank, 2) if name in sharded else t

    whole = {name: t.double().clone().requires_grad_() for name, t in tensors.items()}
    mine = {name: local(name, t).clone().requires_grad_() for name, t in tensors.items()}
    expected = sigmoid_attention(**whole, backend="reference", **options)
    expected.backward(grad.double())
    out = context_parallel_attention(**mine, mesh=mesh, length=n, balanced=case["balanced"], **options)
    out.backward(local("output", grad))
    tolerance = {torch.float64: 1e-10, torch.bfloat16: 5e-2}[dtype]
    results = {"output": (out, expected)} | {name: (t.grad, whole[name].grad) for name, t in mine.items()}
    for name, (ours, theirs) in results.items():
        assert ours.dtype == dtype, (name, ours.dtype)
        ours = ours.detach().double()
        if name not in sharded:
            dist.all_reduce(ours)
        what = f"{name} {case}: "
        torch.testing.assert_close(
            ours, local(name, theirs), rtol=tolerance, atol=tolerance * 3, msg=lambda m, what=what: what + m
        )


def attention(mesh):
    for case in CASES:
        check(mesh, case)


MODELS = [
    {"position": "rope", "num_kv_heads": 2, "attention_bias": "log_batch", "length_power": 0.5, "normalize": True},
    {"position": "alibi", "attention_bias": "log_alibi", "temperature": 0.3},
    {"position": "sincos", "attention_bias": "log_visible", "learn_bias": "head", "norm_placement": "hybrid"},
]


def models(mesh):
    for settings in MODELS:
        torch.manual_seed(0)
        config = LanguageModelConfig(vocab_size=13, max_seq_len=29, num_layers=2, embed_dim=32, num_heads=4, **settings)
        model = LanguageModel(config).double()
        tokens = torch.randint(13, (2, 29))
        whole = model(tokens)
        expected = torch.autograd.grad(whole.square().sum(), list(model.parameters()))
        share = ContextParallelShard(mesh, SequenceSharding(29, mesh.size(), balanced=True))
        with context_parallel(model, share), recording(model):
            part = model(share.shard(tokens))
            gradients = torch.autograd.grad(part.square().sum(), list(model.parameters()))
        torch.testing.assert_close(part, share.shard(whole), rtol=1e-5, atol=1e-6)
        for gradient in gradients:
            dist.all_reduce(gradient)
        torch.testing.assert_close(gradients, expected, rtol=1e-4, atol=1e-5)
        assert torch.equal(model(tokens), whole)
    with (
        context_parallel(model, share),
        pytest.raises(ValueError, match="context parallelism needs sigmoid self-attention"),
    ):
        model(share.shard(tokens), cache=model.new_kv_cache())


def cache(mesh):
    rank, ranks = mesh.get_local_rank(), mesh.size()
    capacity = 4
    for backends, options in (
        (("reference", "blocked"), {"softcap": 0.7, "alibi_slopes": torch.tensor([0.1, 0.3, 0.2, 0.4])}),
        (("reference",), {"causal": False, "window_size": (4, 0)}),
        (("triton",), {"normalize": True, "window_size": (4, 0)}),
        (("blocked",), {"normalize": True, "sigmoid_bias": -200.0}),
    ):
        for name in backends:
            torch.manual_seed(0)
            dtype = torch.float32 if name == "triton" else torch.float64
            alone = [torch.full((2, capacity * ranks, 2, 8), torch.nan, dtype=dtype) for _ in range(2)]
            mine = [torch.full((2, capacity, 2, 8), torch.nan, dtype=dtype) for _ in range(2)]
            lengths = torch.zeros(2, dtype=torch.int64)
            for new in (4, 1, 2):
                q, k, v = torch.randn(2, new, 4, 8, dtype=dtype), *torch.randn(2, 2, new, 2, 8, dtype=dtype).unbind()
                more = {"causal": True, "sigmoid_bias": -1.5, "cache_seqlens": lengths, **options}
                whole = flash_attn_with_kvcache(q, *alone, k, v, **more)
                with patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce:
                    shared_out = sharded_cache_attention(q, *mine, k, v, mesh=mesh, backend=name, **more)
                torch.testing.assert_close(shared_out, whole, rtol=1e-4, atol=1e-5)
                assert all_reduce.call_count == (2 if "normalize" in options else 1)
                lengths = lengths + torch.tensor([new, new])
            for own, all_of_it in zip(mine, alone, strict=True):
                expected = all_of_it[:, rank * capacity : (rank + 1) * capacity]
                torch.testing.assert_close(own, expected, equal_nan=True)
    before = [t.clone() for t in mine]
    with pytest.raises(ValueError, match="cannot hold lengths"):
        sharded_cache_attention(
            q, *mine, k, v, mesh=mesh, cache_seqlens=torch.tensor([3, capacity * ranks]), sigmoid_bias=-1.0
        )
    options = {"cache_seqlens": torch.tensor([0, 0]), "sigmoid_bias": -1.0, "normalize": True}
    with backend("reference"), pytest.raises(ValueError, match="'reference' does not support normalize=True"):
        sharded_cache_attention(q, *mine, k, v, mesh=mesh, **options)
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(mine, before, strict=True))


def dtensors(mesh):
    """The operator of DTensors: sharded over samples or heads, with options that are sharded or broadcast."""
    torch.manual_seed(0)
    parts = mesh.size()
    tensors = [torch.randn(parts, h * parts, n, 8, dtype=torch.float64) for h, n in ((2, 5), (1, 7), (1, 7))]
    tensors += [torch.randn(shape, dtype=torch.float64) for shape in ((1, 2 * parts, 1, 1), (parts, 1, 5, 7))]
    lengths = torch.arange(parts) % 7 + 1

    def call(query, key, value, bias, mask, lengths):
        out = sigmoid_attention(query, key, value, is_causal=True, bias=bias, enable_gqa=True, normalize=True)
        return out + sigmoid_attention(query, key, value, mask, enable_gqa=True, key_lengths=lengths)

    whole = [t.clone().requires_grad_() for t in tensors]
    expected = call(*whole, lengths)
    grad = torch.randn_like(expected)
    expected_gradients = torch.autograd.grad(expected, whole, grad)
    for dim in (None, 0, 1):

        def distribute(t, dim=dim):
            is_sharded = dim is not None and t.dim() > dim and t.shape[dim] > 1
            return distribute_tensor(t, mesh, [Shard(dim) if is_sharded else Replicate()])

        shards = [distribute(t).requires_grad_() for t in tensors]
        out = call(*shards, distribute(lengths))
        assert out.placements == ((Replicate() if dim is None else Shard(dim)),)
        gradients = torch.autograd.grad(out, shards, distribute(grad))
        for ours, theirs in zip((out, *gradients), (expected, *expected_gradients), strict=True):
            torch.testing.assert_close(ours.full_tensor(), theirs)
    with pytest.raises(ValueError, match="dropout_p is not supported with DTensor"):
        sigmoid_attention(*shards[:3], enable_gqa=True, dropout_p=0.5)
    # 2 heads of the key for each process but the last: its query heads would belong to others
    uneven = [torch.randn(1, h * (2 * parts - 1), 5, 8, dtype=torch.float64) for h in (2, 1, 1)]
    out = sigmoid_attention(*(distribute_tensor(t, mesh, [Shard(1)]) for t in uneven), enable_gqa=True)
    torch.testing.assert_close(out.full_tensor(), sigmoid_attention(*uneven, enable_gqa=True))


def invalid(mesh):
    """Invalid arguments raise on every process, before anything is sent."""
    q = torch.randn(1, 2, 6, 4)
    for change, message in [
        ({"length": 100}, "shard the sequence by SequenceSharding.shard and pass length"),
        ({"bias": torch.ones(3, 1, 1, 1)}, "bias"),
    ]:
        with pytest.raises(ValueError, match=message):
            context_parallel_attention(q, q, q, mesh=mesh, **change)
    with pytest.raises(ValueError, match="must have the same number of positions"):
        context_parallel_attention(q[:, :, :3], q, q, mesh=mesh)
    with backend("reference"), pytest.raises(ValueError, match="'reference' does not support normalize=True"):
        context_parallel_attention(q, q, q, mesh=mesh, normalize=True)


def dying(mesh):
    """One process ends in the middle; the others must raise."""
    q = torch.randn(1, 2, 8, 4)
    context_parallel_attention(q, q, q, mesh=mesh)
    if mesh.get_local_rank() == 1:
        os._exit(0)
    start = time.time()
    try:
        for _ in range(3):
            context_parallel_attention(q, q, q, mesh=mesh)
    except RuntimeError as error:
        print(f"error after {time.time() - start:.1f} s: {str(error)[:60]}", file=sys.stderr, flush=True)
        os._exit(7)
    raise AssertionError("the dead process was not noticed")


def main():
    """Make every comparison; the last one ends the processes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for compare in (attention, models, invalid, cache, dtensors):
        compare(mesh)
    print("compared", file=sys.stderr, flush=True)
    dying(mesh)
