"""Invalid calls: an error before any computation, with the arguments and the remedy."""

import math

import pytest
import torch

import sigattn
from sigattn import log_length_bias, sigmoid_attention
from tests.ops.cases import COMPLETE, ON_CPU, SUPPORTING


def operands(b=2, hq=4, hkv=4, n=5, m=6, d=8, dv=7, dtype=torch.float32):
    return [torch.randn(s, dtype=torch.float32).to(dtype) for s in ((b, hq, n, d), (b, hkv, m, d), (b, hkv, m, dv))]


Q, K, V = operands()
META = torch.device("meta")


def bad(message, *tensors, **options):
    """Return a call of the operator and what its error says; query, key and value unless others are given."""
    return tensors or (Q, K, V), options, message


def mask(*shape, dtype=torch.bool):
    return Q, K, V, torch.ones(shape).to(dtype)


VALUES = {
    "rank": bad(r"at least 2 dimensions.*query \(8,\) float32 on cpu", Q[0, 0, 0], K, V),
    "head_dim": bad(r"same head_dim.*\(2, 4, 6, 3\)", Q, K[..., :3], V),
    "length": bad("key and value must have the same length", Q, K, V[:, :, :2]),
    "batch": bad("same batch size, or 1", Q, *(t[:1].expand(3, -1, -1, -1) for t in (K, V))),
    "mask of three": bad(r"\(Hq, N, M\) = \(4, 5, 6\)", Q[0], K[0], V[0], torch.ones(1, 1, 5, 6)),
    "bias of two": bad(r"\(N, 1\) = \(5, 1\)", Q[0, 0], K[0, 0], V[0, 0], bias=torch.ones(6, 1)),
    "lengths of three": bad(r"before its heads, \(\)", Q[0], K[0], V[0], key_lengths=torch.tensor([3])),
    "slopes of five": bad(r"\(…, Hq, 2\)", Q[None], K[None], V[None], alibi_slopes=torch.ones(2, 4)),
    "heads": bad("pass enable_gqa=True", Q, K[:, :2], V[:, :2]),
    "heads of value": bad("key and value must have the same number of heads, or 1", Q, K, V[:, :2]),
    "other layout": bad(r"t.transpose\(1, 2\)", Q, torch.randn(2, 6, 5, 8), torch.randn(2, 6, 5, 8)),
    "mask of the other layout": bad(r"t.transpose\(1, 2\)", *mask(4, 4)),
    "heads of value shared": bad("not a multiple of the 3 of value", Q, K, V[:, :3], enable_gqa=True),
    "divisible": bad("not a multiple", Q, K[:, :3], V[:, :3], enable_gqa=True),
    "no query heads": bad("the 0 heads of query are not a multiple of", Q[:, :0], K, V, enable_gqa=True),
    "devices": bad("one device.*on meta", Q, K.to(META), V.to(META)),
    "mask shape": bad(r"\(2, 4, 5, 6\).*attn_mask \(5, 5\)", *mask(5, 5)),
    "mask of padding": bad(r"\(B, M\), pass attn_mask\[:, None, None, :\] or key_l", *mask(2, 6)),
    "mask device": bad("query's device", Q, K, V, torch.ones(5, 6, device=META)),
    "bias columns": bad("one per key as an additive attn_mask", bias=torch.zeros(5, 6)),
    "bias shape": bad(r"per head is \(Hq, 1, 1\)", bias=torch.zeros(4)),
    "bias device": bad("query's device", bias=torch.zeros(1, device=META)),
    "offset": bad(r"query_offset must lie in -2\^30 … 2\^30, got 10", query_offset=(1 << 30) + 1),
    "softcap": bad("softcap must be finite and at least 0", softcap=-1.0),
    "softcap nan": bad("softcap must be finite and at least 0", softcap=math.nan),
    "lengths above": bad(r"0…6.*\[3, 7\]", key_lengths=torch.tensor([3, 7])),
    "lengths shape": bad(r"\(B,\) = \(2,\)", key_lengths=torch.tensor([3])),
    "slopes shape": bad(r"\(Hq,\), \(B, Hq\)", alibi_slopes=torch.ones(3)),
    "dropout 1": bad(r"\[0, 1\), got 1.0", dropout_p=1.0),
    "dropout nan": bad(r"\[0, 1\)", dropout_p=math.nan),
    "scale NaN": bad("scale is NaN", scale=math.nan),
    "backend": bad("unknown backend 'cuda'; choose one of 'triton', 'llvm'", backend="cuda"),
}
TYPES = {
    "not a tensor": bad("query must be a tensor, got ndarray", Q.numpy(), K, V),
    "triton-sigmoid's order": bad(r"got bool; .* as in flash-attn and triton-sigmoid", Q, K, V, True),
    "mixed dtypes": bad("one dtype.*float64", Q, K.double(), V),
    "float8": bad("bfloat16, float32 or float64; got", *(t.to(torch.float8_e4m3fn) for t in (Q, K, V))),
    "sparse": bad("dense", Q.to_sparse(), K, V),
    "causal None": bad("is_causal must be True or False, got None", is_causal=None),
    "causal mask": bad("pass a mask as attn_mask", is_causal=torch.ones(5, 6) > 0),
    "normalize": bad("normalize must be True or False, got 1", normalize=1),
    "mask dtype": bad("bool", *mask(5, 6, dtype=torch.int32)),
    "mask type": bad("attn_mask must be a tensor", Q, K, V, [[True]]),
    "bias of 8 bits": bad("of 16 bits and more", bias=torch.zeros(1).to(torch.float8_e5m2)),
    "bias type": bad("bias, if not a tensor, must be a number", bias="-log n"),
    "window type": bad(r"pair \(left, right\), got 3", window=3),
    "window float": bad("each side of window must be an integer, got 1.5", window=(1.5, 0)),
    "window tensor": bad("must be an integer", window=(torch.tensor(1.0), 0)),
    "offset": bad("query_offset must be an integer", query_offset=0.5),
    "softcap type": bad("softcap must be a number", softcap=True),
    "lengths dtype": bad("integers", key_lengths=torch.tensor([3.0, 4.0])),
    "scale bool": bad("scale must be a number, got True", scale=True),
    "scale type": bad("scale must be a number", scale="auto"),
    "scale gradient": bad("scale would lose its gradient", scale=torch.tensor(1.0, requires_grad=True)),
}


@pytest.mark.parametrize(
    ("error", "call"), [(e, call) for e, calls in ((ValueError, VALUES), (TypeError, TYPES)) for call in calls]
)
def test_a_wrong_call_is_explained(error, call):
    tensors, options, message = (VALUES if error is ValueError else TYPES)[call]
    with pytest.raises(error, match=f"(?s)sigmoid_attention: .*{message}"):
        sigmoid_attention(*tensors, **options)


STATISTICS = {
    "head_dim": bad("same head_dim", Q, K[..., :3], V),
    "activation": bad("unknown activation None; choose one of .*'identity'$", activation=None),
    "no query": bad("at least one query", Q[:, :, :0], K, V),
    "lengths": bad("0…6", key_lengths=torch.tensor([3, 7])),
    "causal": bad("is_causal must be True or False", is_causal=None),
}


@pytest.mark.parametrize("call", STATISTICS)
def test_a_wrong_call_of_statistics_is_explained(call):
    tensors, options, message = STATISTICS[call]
    with pytest.raises((ValueError, TypeError), match=f"(?s): .*{message}"):
        sigattn.attention_statistics(*tensors, **options)


@pytest.mark.parametrize(
    ("n", "error", "message"),
    [(0, ValueError, "at least 1"), (-3, ValueError, "at least 1"),
     *((n, TypeError, "int or a tensor") for n in (1.5, "8", True, None))],
)  # fmt: skip
def test_log_length_bias_needs_a_number_of_keys(n, error, message):
    with pytest.raises(error, match=message):
        log_length_bias(n)


class TestWhatIsNotWrong:
    """Edges of the definition."""

    @pytest.mark.parametrize("backend", [*SUPPORTING, None])
    def test_sizes_of_0(self, backend):
        for shape in ((0, 4, 4, 5, 6), (2, 4, 4, 0, 6), (2, 4, 4, 5, 0), (2, 0, 0, 5, 6), (2, 0, 1, 5, 6)):
            q, k, v = (t.requires_grad_() for t in operands(*shape))
            out = sigmoid_attention(q, k, v, backend=backend)
            assert out.shape == (shape[0], shape[1], shape[3], 7)
            for g, t in zip(torch.autograd.grad(out.sum(), (q, k, v)), (q, k, v), strict=True):
                assert g.shape == t.shape
            assert shape[4] or not out.any()

    @pytest.mark.parametrize("backend", ON_CPU)
    @pytest.mark.parametrize(("d", "dv"), [(0, 7), (4, 0), (0, 0)])
    def test_heads_without_features(self, backend, d, dv):
        """Without those of queries and keys every logit is the bias; without those of values there is no gradient."""
        q, k, v = (t.requires_grad_() for t in operands(hkv=2, d=d, dv=dv))
        out = sigmoid_attention(q, k, v, bias=0.0, enable_gqa=True, backend=backend)
        expected = 0.5 * v.sum(2, keepdim=True).repeat_interleave(2, 1).expand_as(out)
        torch.testing.assert_close(out, expected)
        grad = torch.randn_like(out)
        found = torch.autograd.grad(out, (q, k, v), grad)
        assert [(g.shape, bool(g.any())) for g in found[:2]] == [(q.shape, False), (k.shape, False)]
        torch.testing.assert_close(found[2], torch.autograd.grad(expected, v, grad)[0])

    @pytest.mark.parametrize("backend", COMPLETE)
    def test_a_scale_of_zero_times_nan_and_logits_that_overflow(self, backend):
        for n in (5, 40):
            q, k, v = torch.randn(3, 2, 2, n, 16).unbind()
            q[0, 0, 2, 0] = math.nan
            out = sigmoid_attention(q, k, v, scale=0.0, backend=backend)  # 0 · NaN is NaN
            assert (out[0, 0, 2].isnan().all(), out.isnan().sum()) == (True, 16)
        q, k, v = operands()
        q[0], k[0] = 1e30, 1e30  # logits overflow to +inf: each weight is 1
        torch.testing.assert_close(
            sigmoid_attention(q, k, v, backend=backend)[0], v[0].sum(1, keepdim=True).expand(4, 5, 7)
        )
