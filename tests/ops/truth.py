"""Independent reference: sigmoid attention in float64 from the plain formula, entry by entry where needed.

It shares no code with the library, so the reference backend is tested against it like any other.
"""

import torch
from torch.nn import functional as F


def formula(
    q, k, v, mask=None, causal=False, scale=None, bias=None, window=None, slopes=None, lengths=None, softcap=0.0,
    normalize=False, dtype=None, probe=None, weights=False, offset=0, kept=None,
):  # fmt: skip
    """Return σ(cap(scale · Q Kᵀ) + b + position + mask) V in the given dtype, float64 by default.

    With ``normalize`` each row of weights is divided by its sum, in logarithms, so that no sum underflows.

    probe: zeros (B, Hq, N, M) added to the logits, whose gradient is that of the logits. weights: return P instead.
    offset: position of the first query. kept: factors of dropout, 0 or 1 / (1 - p), of the weights (B, Hq, N, M).
    """
    dtype = dtype or torch.float64
    q, k, v = (t.to(dtype) for t in (q, k, v))
    (batch, heads, n, d), m = q.shape, k.shape[2]
    k, v = (t.repeat_interleave(heads // max(1, t.shape[1]), 1) for t in (k, v))
    visible = torch.ones(batch, heads, n, m, dtype=torch.bool)
    i, j = torch.arange(n)[:, None] + offset, torch.arange(m)[None, :]
    left, right = window or (-1, -1)
    for is_limited, sees in ((causal, j <= i), (left != -1, j >= i - left), (right != -1, j <= i + right)):
        visible = visible & sees if is_limited else visible
    if lengths is not None:
        exists = torch.arange(m) < lengths[:, None]
        visible = visible & exists[:, None, None, :]
        k, v = (torch.where(exists[:, None, :, None], t, 0) for t in (k, v))
    s = q @ k.mT * (scale if scale is not None else max(1, d) ** -0.5)
    if softcap:
        s = torch.tanh(s / softcap) * softcap
    if bias is None:
        n_keys = torch.full((batch,), m) if lengths is None else lengths
        bias = -n_keys.clamp(min=1).double().log()[:, None, None, None] - (6 if normalize else 0)
    s = s + (bias.to(dtype) if isinstance(bias, torch.Tensor) else bias)
    if slopes is not None:
        slopes = slopes.to(dtype)
        slopes = slopes if slopes.dim() > 1 else slopes[None]
        before, after = (slopes, slopes) if slopes.dim() == 2 else slopes.unbind(-1)
        slope = torch.where(j < i, before[..., None, None], after[..., None, None])
        s = s - slope * (i - j).abs()
    if mask is not None:
        if mask.dtype is torch.bool:
            visible = visible & mask
        else:
            visible = visible & (mask != -torch.inf)
            s = s + mask.to(dtype).masked_fill(mask == -torch.inf, 0)
    s = s if probe is None else s + probe
    if normalize:
        hidden = torch.where(visible.any(-1, keepdim=True), -torch.inf, 0)
        logs = torch.where(visible, F.logsigmoid(s), hidden)
        p = torch.where(visible, logs.softmax(-1), 0).to(dtype)
    else:
        p = torch.where(visible, torch.sigmoid(s), 0).to(dtype)
    p = p if kept is None else p * kept.to(dtype)
    return p if weights else p @ v


def formula_options(options):
    names = {
        "attn_mask": "mask", "is_causal": "causal", "alibi_slopes": "slopes", "key_lengths": "lengths",
        "query_offset": "offset",
    }  # fmt: skip
    return {names.get(name, name): x for name, x in options.items() if name != "enable_gqa"}


def one_sequence(q, k, v, dtype=None, bias=None, slopes=None, **options):
    """(N, Hq, D), (M, Hkv, D), (M, Hkv, Dv) → (N, Hq, Dv), last query at last key; bias: (Hq,), (Hq, N), float."""
    bias = bias.reshape(len(bias), -1, 1) if isinstance(bias, torch.Tensor) else bias
    offset = len(k) - len(q)
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    return formula(q, k, v, dtype=dtype, bias=bias, slopes=slopes, offset=offset, **options)[0].transpose(0, 1)


def sums_of_magnitudes(given, grad_out, **options):
    """Return Σ|terms| of the sums in the output and each gradient, with which rounding errors scale."""
    q, k, v = (given[name].double() for name in ("query", "key", "value"))
    (batch, heads, n, d), m = q.shape, k.shape[2]
    probe = torch.zeros(batch, heads, n, m, dtype=torch.float64, requires_grad=True)
    (ds,) = torch.autograd.grad(formula(q, k, v, probe=probe, **options), probe, grad_out.double())
    p, ds = formula(q, k, v, weights=True, **options), ds.abs()
    scale = abs(options["scale"] if options["scale"] is not None else d**-0.5)
    k, v = (torch.nan_to_num(t).repeat_interleave(heads // t.shape[1], 1).abs() for t in (k, v))
    if options.get("normalize"):  # dS is a difference
        grad_weights = grad_out.double().abs() @ v.mT
        undropped = formula(q, k, v, weights=True, **options | {"kept": None})
        ds = undropped * (grad_weights * options.get("kept", 1) + (p * grad_weights).sum(-1, keepdim=True))
    distance = (torch.arange(n)[:, None] + options.get("offset", 0) - torch.arange(m)).abs()
    terms = {
        "output": p @ v,
        "query": scale * ds @ k,
        "key": scale * ds.mT @ q.abs(),
        "value": p.mT @ grad_out.double().abs(),
        "bias": ds.sum((-2, -1)),
        "attn_mask": ds,
        "alibi_slopes": (ds * distance).sum((-2, -1)),
    }
    repeats = {"key": heads // given["key"].shape[1], "value": heads // given["value"].shape[1]}
    # an error of S is a relative error of P, and S is a sum of its own
    logits = (scale * q.abs() @ k.mT).max().item() if n and m and batch else 0.0
    logits += options["bias"].abs().max().item() if isinstance(options["bias"], torch.Tensor) and batch and n else 10.0
    most = {name: t.max().item() * repeats.get(name, 1) if t.numel() else 0.0 for name, t in terms.items()}
    for name in ("bias", "attn_mask", "alibi_slopes"):  # summed further along what they are broadcast along
        if name in given and given[name].numel():
            most[name] *= terms[name].numel() / given[name].numel()
    return {name: (1 + logits) * size for name, size in most.items()}


def assert_as_good_as_formula(ours, truth, formula_in_dtype, magnitude=None, what="", dtype=None):
    """Assert that the error is at most twice that of the plain formula in the same dtype, plus rounding of the sums.

    dtype: dtype of the computation, if it differs from that of the result (a float32 bias of bfloat16 queries).
    """
    assert ours.dtype == formula_in_dtype.dtype, (ours.dtype, formula_in_dtype.dtype)
    assert ours.shape == truth.shape, (ours.shape, truth.shape)
    if truth.numel() == 0:
        return
    magnitude = truth.abs().max().item() if magnitude is None else magnitude
    eps = max(torch.finfo(t).eps for t in (ours.dtype, dtype or ours.dtype))
    rounding = eps * magnitude + torch.finfo(ours.dtype).smallest_normal
    error = (ours.double() - truth).abs().max().item()
    allowed = 2 * (formula_in_dtype.double() - truth).abs().max().item() + 2 * rounding
    assert error <= allowed, f"{what}: error {error:.3g} exceeds {allowed:.3g} (sums up to {magnitude:.3g})"
