"""Invalid calls: an error before any computation, with the arguments and the remedy."""

import math

import pytest
import torch

import sigattn
from sigattn import log_length_bias, sigmoid_attention
from tests.ops.cases import COMPLETE, SUPPORTING


def operands(b=2, hq=4, hkv=4, n=5, m=6, d=8, dv=7, dtype=torch.float32):
    return [torch.randn(s, dtype=torch.float32).to(dtype) for s in ((b, hq, n, d), (b, hkv, m, d), (b, hkv, m, dv))]


Q, K, V = operands()
META = torch.device("meta")

WRONG = {  # what: positional arguments, options, error, what the message must say
    "not a tensor": ((Q.numpy(), K, V), {}, TypeError, "query must be a tensor, got ndarray"),
    "rank": ((Q[0, 0, 0], K, V), {}, ValueError, r"at least 2 dimensions.*query \(8,\) float32 on cpu"),
    "rank for gqa": ((Q[0, 0], K, V), {"enable_gqa": True}, ValueError, "needs a dimension of heads"),
    "head_dim": ((Q, K[..., :3], V), {}, ValueError, r"same head_dim.*\(2, 4, 6, 3\)"),
    "length": ((Q, K, V[:, :, :2]), {}, ValueError, r"key and value must have the same length"),
    "batch": ((Q, *(t[:1].expand(3, -1, -1, -1) for t in (K, V))), {}, ValueError, "same batch size, or 1"),
    "five dimensions": ((Q.expand(2, 2, 4, 5, 8), K.expand(3, 2, 4, 6, 8), V), {}, ValueError, "same batch size, or 1"),
    "mask of three": ((Q[0], K[0], V[0], torch.ones(1, 1, 5, 6)), {}, ValueError, r"\(Hq, N, M\) = \(4, 5, 6\)"),
    "bias of two": ((Q[0, 0], K[0, 0], V[0, 0]), {"bias": torch.ones(6, 1)}, ValueError, r"\(N, 1\) = \(5, 1\)"),
    "lengths of three": ((Q[0], K[0], V[0]), {"key_lengths": torch.tensor([3])}, ValueError, r"before its heads, \(\)"),
    "slopes of five": (
        (Q[None], K[None], V[None]),
        {"alibi_slopes": torch.ones(2, 4)},
        ValueError,
        r"\(…, Hq, 2\)",
    ),
    "heads": ((Q, K[:, :2], V[:, :2]), {}, ValueError, "pass enable_gqa=True"),
    "heads of value": ((Q, K, V[:, :2]), {}, ValueError, "key and value must have the same number of heads, or 1"),
    "other layout": ((Q, torch.randn(2, 6, 5, 8), torch.randn(2, 6, 5, 8)), {}, ValueError, r"t.transpose\(1, 2\)"),
    "mask of the other layout": ((Q, K, V, torch.ones(4, 4) > 0), {}, ValueError, r"t.transpose\(1, 2\)"),
    "triton-sigmoid's order": ((Q, K, V, True), {}, TypeError, r"got bool; .* as in flash-attn and triton-sigmoid"),
    "heads of value shared": (
        (Q, K, V[:, :3]),
        {"enable_gqa": True},
        ValueError,
        "not a multiple of the 3 value heads",
    ),
    "divisible": ((Q, K[:, :3], V[:, :3]), {"enable_gqa": True}, ValueError, "not a multiple"),
    "no query heads": (
        (Q[:, :0], K, V),
        {"enable_gqa": True},
        ValueError,
        "the 0 heads of query are not a multiple of",
    ),
    "no query heads, one sample": ((Q[:1, :0], K, V), {"enable_gqa": True}, ValueError, "the 0 query heads are not a"),
    "mixed dtypes": ((Q, K.double(), V), {}, TypeError, r"one dtype.*float64"),
    "float8": (tuple(t.to(torch.float8_e4m3fn) for t in (Q, K, V)), {}, TypeError, "bfloat16, float32 or float64; got"),
    "causal text": ((Q, K, V), {"is_causal": "no"}, TypeError, r"is_causal must be True or False, got 'no' \(str\)"),
    "causal None": ((Q, K, V), {"is_causal": None}, TypeError, "is_causal must be True or False, got None"),
    "causal mask": ((Q, K, V), {"is_causal": torch.ones(5, 6) > 0}, TypeError, "pass a mask as attn_mask"),
    "gqa text": ((Q, K, V), {"enable_gqa": "no"}, TypeError, "enable_gqa must be True or False, got 'no'"),
    "integers": ((Q.long(), K.long(), V.long()), {}, TypeError, "must be floating point"),
    "complex": ((Q.cfloat(), K.cfloat(), V.cfloat()), {}, TypeError, "must be floating point"),
    "devices": ((Q, K.to(META), V.to(META)), {}, ValueError, r"one device.*on meta"),
    "sparse": ((Q.to_sparse(), K, V), {}, TypeError, "dense"),
    "mask shape": (
        (Q, K, V, torch.ones(5, 5, dtype=torch.bool)),
        {},
        ValueError,
        r"\(2, 4, 5, 6\).*attn_mask \(5, 5\)",
    ),
    "mask of padding": (
        (Q, K, V, torch.ones(2, 6) > 0),
        {},
        ValueError,
        r"\(B, M\), pass attn_mask\[:, None, None, :\] or key_l",
    ),
    "mask rank": ((Q, K, V, torch.ones(1, 1, 1, 5, 6, dtype=torch.bool)), {}, ValueError, "does not broadcast"),
    "mask grows batch": ((Q, K, V, torch.ones(3, 1, 1, 1)), {}, ValueError, "does not broadcast"),
    "mask dtype": ((Q, K, V, torch.ones(5, 6, dtype=torch.int32)), {}, TypeError, "bool"),
    "mask of 8 bits": ((Q, K, V, torch.ones(5, 6).to(torch.float8_e4m3fn)), {}, TypeError, "of 16 bits and more"),
    "bias of 8 bits": ((Q, K, V), {"bias": torch.zeros(1).to(torch.float8_e5m2)}, TypeError, "of 16 bits and more"),
    "mask type": ((Q, K, V, [[True]]), {}, TypeError, "attn_mask must be a tensor"),
    "mask device": ((Q, K, V, torch.ones(5, 6, device=META)), {}, ValueError, "query's device"),
    "bias columns": ((Q, K, V), {"bias": torch.zeros(5, 6)}, ValueError, "one per key as an additive attn_mask"),
    "bias shape": ((Q, K, V), {"bias": torch.zeros(4)}, ValueError, r"per head is \(Hq, 1, 1\)"),
    "bias dtype": ((Q, K, V), {"bias": torch.zeros(1, dtype=torch.long)}, TypeError, "bias must be floating point"),
    "bias type": ((Q, K, V), {"bias": "-log n"}, TypeError, "bias, if not a tensor, must be a number"),
    "bias bool": ((Q, K, V), {"bias": True}, TypeError, "bias, if not a tensor, must be a number"),
    "bias device": ((Q, K, V), {"bias": torch.zeros(1, device=META)}, ValueError, "query's device"),
    "window side": ((Q, K, V), {"window": (-2, 0)}, ValueError, r"at least 0, or -1.*\(-2, 0\)"),
    "window type": ((Q, K, V), {"window": 3}, TypeError, r"pair \(left, right\), got 3"),
    "window float": ((Q, K, V), {"window": (1.5, 0)}, TypeError, "each side of window must be an integer, got 1.5"),
    "window bool": ((Q, K, V), {"window": (True, 0)}, TypeError, "must be an integer, got True"),
    "window tensor": ((Q, K, V), {"window": (torch.tensor(1.0), 0)}, TypeError, "must be an integer"),
    "offset": (
        (Q, K, V),
        {"query_offset": (1 << 30) + 1},
        ValueError,
        r"query_offset must lie in -2\^30 … 2\^30, got 10",
    ),
    "negative offset": ((Q, K, V), {"query_offset": -(1 << 40)}, ValueError, "query_offset must lie in"),
    "softcap": ((Q, K, V), {"softcap": -1.0}, ValueError, "softcap must be finite and at least 0"),
    "softcap inf": ((Q, K, V), {"softcap": math.inf}, ValueError, "softcap must be finite and at least 0"),
    "softcap nan": ((Q, K, V), {"softcap": math.nan}, ValueError, "softcap must be finite and at least 0"),
    "softcap type": ((Q, K, V), {"softcap": True}, TypeError, "softcap must be a number"),
    "lengths above": ((Q, K, V), {"key_lengths": torch.tensor([3, 7])}, ValueError, r"0…6.*\[3, 7\]"),
    "lengths below": ((Q, K, V), {"key_lengths": torch.tensor([-1, 3])}, ValueError, "0…6"),
    "lengths shape": ((Q, K, V), {"key_lengths": torch.tensor([3])}, ValueError, r"\(B,\) = \(2,\)"),
    "lengths dtype": ((Q, K, V), {"key_lengths": torch.tensor([3.0, 4.0])}, TypeError, "integers"),
    "lengths type": ((Q, K, V), {"key_lengths": [3, 4]}, TypeError, "tensor of integers"),
    "slopes shape": ((Q, K, V), {"alibi_slopes": torch.ones(3)}, ValueError, r"\(Hq,\), \(B, Hq\)"),
    "slopes dtype": ((Q, K, V), {"alibi_slopes": torch.ones(4, dtype=torch.long)}, TypeError, "floating-point"),
    "dropout 1": ((Q, K, V), {"dropout_p": 1.0}, ValueError, r"\[0, 1\), got 1.0"),
    "dropout < 0": ((Q, K, V), {"dropout_p": -0.1}, ValueError, r"\[0, 1\)"),
    "dropout nan": ((Q, K, V), {"dropout_p": math.nan}, ValueError, r"\[0, 1\)"),
    "scale NaN": ((Q, K, V), {"scale": math.nan}, ValueError, "scale is NaN"),
    "scale bool": ((Q, K, V), {"scale": True}, TypeError, "scale must be a number, got True"),
    "scale gradient": (
        (Q, K, V),
        {"scale": torch.tensor(1.0, requires_grad=True)},
        TypeError,
        "scale would lose its gradient",
    ),
    "dropout bool": ((Q, K, V), {"dropout_p": True}, TypeError, "dropout_p must be a number, got True"),
    "scale type": ((Q, K, V), {"scale": "auto"}, TypeError, "scale must be a number"),
    "backend": (
        (Q, K, V),
        {"backend": "cuda"},
        ValueError,
        "unknown backend 'cuda'; choose one of 'triton', 'llvm'",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_call_is_explained(what):
    args, options, error, message = WRONG[what]
    with pytest.raises(error, match=f"(?s)sigmoid_attention: .*{message}"):
        sigmoid_attention(*args, **options)


def test_statistics_check_too():
    with pytest.raises(ValueError, match="same head_dim"):
        sigattn.attention_statistics(Q, K[..., :3], V)
    with pytest.raises(ValueError, match="unknown activation 'swish'"):
        sigattn.attention_statistics(Q, K, V, activation="swish")
    with pytest.raises(ValueError, match=r"unknown activation None; choose one of .*'identity'$"):
        sigattn.attention_statistics(Q, K, V, activation=None)
    with pytest.raises(TypeError, match="attention_statistics: is_causal must be True or False"):
        sigattn.attention_statistics(Q, K, V, is_causal=None)
    with pytest.raises(ValueError, match="at least one query"):
        sigattn.attention_statistics(Q[:, :, :0], K, V)
    with pytest.raises(ValueError, match="0…6"):
        sigattn.attention_statistics(Q, K, V, key_lengths=torch.tensor([3, 7]))


@pytest.mark.parametrize("n", [0, -3])
def test_log_length_bias_needs_a_key(n):
    with pytest.raises(ValueError, match="at least 1"):
        log_length_bias(n)


@pytest.mark.parametrize("n", [1.5, "8", True, None])
def test_log_length_bias_needs_a_count(n):
    with pytest.raises(TypeError, match="int or a tensor"):
        log_length_bias(n)


class TestWhatIsNotWrong:
    """Edges of the definition."""

    @pytest.mark.parametrize("backend", [*COMPLETE, None])
    @pytest.mark.parametrize(
        "shape", [(0, 4, 4, 5, 6), (2, 4, 4, 0, 6), (2, 4, 4, 5, 0), (2, 0, 0, 5, 6), (2, 0, 1, 5, 6), (1, 1, 1, 1, 1)]
    )
    def test_empty_and_single(self, backend, shape):
        q, k, v = (t.requires_grad_() for t in operands(*shape))
        out = sigmoid_attention(q, k, v, backend=backend)
        assert out.shape == (shape[0], shape[1], shape[3], 7)
        for g, t in zip(torch.autograd.grad(out.sum(), (q, k, v)), (q, k, v), strict=True):
            assert g.shape == t.shape
        if shape[4] == 0:
            assert not out.any()

    @pytest.mark.parametrize("backend", ["reference", "blocked", None])
    def test_a_head_dim_of_0_with_shared_key_heads(self, backend):
        """Every logit is the bias."""
        q, k, v = (t.requires_grad_() for t in operands(hkv=2, d=0))
        out = sigmoid_attention(q, k, v, bias=0.0, enable_gqa=True, backend=backend)
        expected = 0.5 * v.sum(2, keepdim=True).repeat_interleave(2, 1).expand_as(out)
        torch.testing.assert_close(out, expected)
        grad = torch.randn_like(out)
        found = torch.autograd.grad(out, (q, k, v), grad)
        assert [g.shape for g in found] == [q.shape, k.shape, v.shape]
        torch.testing.assert_close(found[2], torch.autograd.grad(expected, v, grad)[0])

    @pytest.mark.parametrize("backend", SUPPORTING)
    @pytest.mark.parametrize("lengths", [[4, 6], [0, 3]])
    def test_what_lies_beyond_key_lengths_does_not_exist(self, backend, lengths):
        lengths = torch.tensor(lengths)
        q, k, v = operands()
        bias = torch.zeros(1, 5, 1, requires_grad=True)
        beyond = (torch.arange(6) >= lengths[:, None])[:, None, :, None]
        leaves = [q.requires_grad_(), k.masked_fill(beyond, math.nan).requires_grad_()]
        leaves.append(v.masked_fill(beyond, math.inf).requires_grad_())
        out = sigmoid_attention(*leaves, key_lengths=lengths, bias=bias, backend=backend)
        gradients = torch.autograd.grad(out.sum(), (*leaves, bias))
        zeros = [t.masked_fill(beyond, 0).requires_grad_() for t in (k, v)]
        expected = sigmoid_attention(q, *zeros, key_lengths=lengths, bias=bias, backend="reference")
        torch.testing.assert_close(out, expected)
        for g, e in zip(gradients, torch.autograd.grad(expected.sum(), (q, *zeros, bias)), strict=True):
            torch.testing.assert_close(g, e)
        assert not gradients[1].masked_select(beyond).any()
        assert not gradients[2].masked_select(beyond).any()

    @pytest.mark.parametrize("backend", COMPLETE)
    def test_inf_and_nan_propagate(self, backend):
        q, k, v = operands()
        v[1, 2, 3, 4] = math.inf
        out = sigmoid_attention(q, k, v, backend=backend)
        assert (out[1, 2, :, 4] == math.inf).all()
        assert out.isinf().sum() == 5
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
