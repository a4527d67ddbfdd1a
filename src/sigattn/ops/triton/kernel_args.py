"""Arguments of the portable kernels, from a problem. Packed tensors have no batch axis: its stride is 0."""

import ctypes
import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sigattn.ops import dropout
from sigattn.ops.problem import NORMALIZED_MARGIN, UNLIMITED, KVCacheProblem, Problem, VarlenProblem, scale_of
from sigattn.ops.triton import activation, tuning
from sigattn.ops.triton.args import Alibi, Bias, Blocks, Mask, Options, Scales, Sequences, Strides, padded_head_dim

LOG2E: float = activation.LOG2E.value
INTERPRETED: bool = activation.INTERPRETED.value
_MAX_TILE_ROWS = 256
_LARGEST_CAP = 256.0  # with which weights of half precision need no relative accuracy of tanh
_MAX_SIDE = (1 << 30) - 1  # of a window, so that positions and sides add up to less than 2^31
# Tensors whose rows the kernels read or write tile by tile.
IN_ROWS = ("query", "key", "value", "out", "grad_out", "grad_query", "grad_key", "grad_value")
BiasArguments = tuple[Bias, tuple[int, ...], str]  # with the strides along (B, H, N) and ``Options.BIAS``


@dataclass
class Launch:
    """Arguments shared by all kernels of a problem with B samples of at most N queries and M keys."""

    problem: Problem | VarlenProblem
    batch: int
    heads: int
    kv_heads: int
    n: int
    m: int
    arguments: dict[str, Any]
    options: Options

    @property
    def may_use_tma(self) -> bool:
        """True if the call is long enough for TMA descriptors to be worth the host's time."""
        return self.batch * self.heads * self.n * self.m >= tuning.TMA_MIN_WEIGHTS

    def config(self, kernel: str, o: Options, tma: bool = False) -> tuning.Config:
        """Return the tile shape of a kernel, small enough for its options. tma: whether TMA can load the operands."""
        itemsize, mask = self.problem.query.element_size(), self.problem.attn_mask
        current = architecture(self.problem.query.device)
        has_gradient = o.NEED_MASK != "none"
        has_only_mask = not (_fills_registers(o._replace(MASK="none")) or o.NORMALIZE or o.HAS_LEFT or o.HAS_RIGHT)
        if (current, itemsize) == (90, 2) and has_only_mask and not has_gradient:
            masked = tuning.HOPPER_MASKED.get((o.MASK, kernel, padded_head_dim(max(o.D, o.DV))))
            if masked is not None and (tma or not masked.tma):
                return masked
        has_options = _fills_registers(o)
        is_plain = tma and not has_options
        config = tuning.kernel_config(kernel, current, max(o.D, o.DV), itemsize, is_plain, o.PRECISION)
        if has_options:
            for _ in range(1 + has_gradient):
                config = tuning.WITH_OPTIONS.get((kernel, config), config)
            if o.DROPOUT and config.sigmoid == "paired":  # whose hashes the compiler computes in two layouts
                config = config._replace(sigmoid="rcp")
        if mask is None or o.MASK == "keys" or not current:
            return config
        return tuning.fit(kernel, config, o, itemsize, mask.element_size(), current)


def _fills_registers(o: Options) -> bool:
    """Return True if options need registers of their own in the loops of the kernels."""
    are_split = o.PRECISION == "tf32x3"
    has_options = o.MASK != "none" or o.SLOPES or o.BLOCK_Q > 0 or o.SOFTCAP != "none" or o.DROPOUT
    return has_options or (o.NORMALIZE and are_split)


def compiler_settings(kernel: str, config: tuning.Config, o: Options) -> dict[str, int]:
    """Return the settings of Triton's compiler for a portable kernel."""
    # On Hopper the compiler would give the forward kernel with NORMALIZE so many registers that only one program of 8
    # warps fits a multiprocessor, where two of a plain call fit. The limit is met without spills in the loops.
    settings = {"num_warps": config.warps, "num_stages": config.stages}
    fits = not (_fills_registers(o) or o.HAS_LEFT) and max(o.D, o.DV) <= 128 and o.PRECISION == "ieee"
    if fits and o.NORMALIZE and o.WGMMA and config.warps == 8 and kernel == tuning.FWD:
        settings["maxnreg"] = 128
    if config.registers:
        settings["maxnreg"] = config.registers
    return settings


@functools.cache
def architecture(device: torch.device) -> int:
    """Return 90 for compute capability 9.0; 0 for other devices than NVIDIA's."""
    if device.type != "cuda" or torch.version.hip is not None:
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def prepare(problem: Problem | VarlenProblem) -> Launch:
    """Return the arguments of a problem's kernels, without outputs and tile shapes."""
    query, key, value = (limit_strides(t) for t in (problem.query, problem.key, problem.value))
    p = problem._replace(query=query, key=key, value=value)
    heads, kv_heads = query.shape[1], value.shape[1]
    is_packed, mask_blocks = isinstance(p, VarlenProblem), None
    if isinstance(p, VarlenProblem):
        batch, n, m, query_offset = p.sequences, p.max_seqlen_q, p.max_seqlen_k, 0
        sequences = Sequences(None, p.cu_seqlens_q.contiguous(), p.cu_seqlens_k.contiguous())
    else:
        batch, n, m, query_offset = query.shape[0], query.shape[2], key.shape[2], p.query_offset
        lengths = None if p.key_lengths is None else p.key_lengths.to(query.device).contiguous()
        sequences, mask_blocks = Sequences(lengths, None, None), p.blocks
    bias, (bias_b, bias_h, _), bias_kind = _bias(p, batch, heads, n, m)
    options = common_options(p, heads // max(kv_heads, 1), bias_kind)._replace(
        DROPOUT=p.seed is not None, LENGTHS=sequences.key_lengths is not None, VARLEN=is_packed
    )
    mask, blocks = mask_arg(p.attn_mask, batch, heads, n, m), None
    if mask is not None:
        order = "keys" if mask.q == 0 or n == 1 else "keys, queries" if mask.q == 1 and mask.k else "queries, keys"
        options = options._replace(MASK_ORDER=order)
        visible = _visible_keys(p, mask, batch, heads, n, m)
        if visible is not None:
            lengths = (visible * torch.arange(1, m + 1, device=visible.device)).amax(-1)
            sequences = Sequences(lengths, None, None)
            options = options._replace(MASK="keys", LENGTHS=True)
    if mask_blocks is not None:
        table, tiles = mask_blocks.table.contiguous(), mask_blocks.tiles.contiguous().view(torch.uint8)
        options = options._replace(BLOCK_Q=mask_blocks.size[0], BLOCK_K=mask_blocks.size[1])
        b, h, q, _ = broadcast_strides(table, batch, heads, *table.shape[2:])
        blocks = Blocks(table, b, h, q, tiles)
    width = max(options.D, options.DV)
    if options.WGMMA and query.dtype is torch.float32 and width <= 128 and options.PRECISION == "ieee":
        is_plain = not (_fills_registers(options) or options.NORMALIZE)
        options = options._replace(PRECISION="bf16x6" if is_plain and width > 64 else "tf32x3")
    arguments = common_arguments(p, batch, heads, dropout.keep_scale(p.dropout_p)) | {
        "bias": bias, "bias_b": bias_b, "bias_h": bias_h, "mask": mask, "blocks": blocks, "sequences": sequences,
        "seed": p.seed, "threshold": dropout.threshold(p.dropout_p) if p.seed is not None else 0,
        "len_q": n, "len_k": m, "heads": heads, "query_offset": query_offset,
    }  # fmt: skip
    return Launch(p, batch, heads, kv_heads, n, m, arguments, options)


def common_arguments(
    p: Problem | VarlenProblem | KVCacheProblem, batch: int, heads: int, keep_scale: float = 1.0
) -> dict[str, Any]:
    """Return the arguments that are the same for dense and packed problems and those with a cache."""
    slopes = p.alibi_slopes
    z, cap = (-p.softcap, scale_of(p) / p.softcap) if p.softcap else (-scale_of(p), 0.0)
    return {
        "query": p.query, "key": p.key, "value": p.value,
        "left": min(p.left, _MAX_SIDE), "right": min(p.right, _MAX_SIDE),
        "alibi": None if slopes is None else Alibi(slopes, *broadcast_strides(slopes, batch, heads, 2)),
        "scales": Scales(to_float32(z * LOG2E), to_float32(cap), to_float32(keep_scale)),
    }  # fmt: skip


def common_options(p: Problem | VarlenProblem | KVCacheProblem, group: int, bias: str) -> Options:
    """Return the options that are the same for dense and packed problems and those with a cache."""
    return Options(
        D=p.query.shape[-1], DV=p.value.shape[-1], GROUP=group,
        BIAS=bias, SHIFT=bias if p.query.dtype is torch.float16 else "none",
        MASK="none" if p.attn_mask is None else "bool" if p.attn_mask.dtype is torch.bool else "added",
        SLOPES=p.alibi_slopes is not None, SOFTCAP=softcap_accuracy(p), NORMALIZE=p.normalize,
        HAS_LEFT=p.left != UNLIMITED, HAS_RIGHT=p.right != UNLIMITED,
        SIGMOID=sigmoid_form(p), PRECISION=precision(p.query), WGMMA=architecture(p.query.device) == 90,
    )  # fmt: skip


def broadcast_strides(t: Tensor, *size: int) -> list[int]:
    """Return the strides of a tensor expanded to a size, without an operator in recorded passes."""
    return [0 if own == 1 != wanted else stride for own, wanted, stride in zip(t.shape, size, t.stride(), strict=True)]


def strides(t: Tensor | None) -> Strides | None:
    """Return the strides of (B, H, N, E), or of a packed (T, H, E); None for None."""
    if t is None:
        return None
    if t.dim() == 4:
        return Strides(*t.stride())
    row, head, column = t.stride()
    return Strides(0, head, row, column)


def limit_strides(t: Tensor) -> Tensor:
    """Return the tensor, or a dense copy if rows or columns are so far apart that a tile would span 2^31 entries."""

    def fits(t: Tensor) -> bool:
        return max(t.stride(-1) * t.shape[-1], t.stride(-3 if t.dim() == 3 else -2) * _MAX_TILE_ROWS) < 2**31

    if fits(t):
        return t
    near = t.clone()  # in the order of strides if possible, which the fake implementations expect of gradients
    return near if fits(near) else t.contiguous()


def unit(*tensors: Tensor) -> int:
    """Return the entries of 16 bytes if all rows start at multiples of that and the compiler has to know, else 1.

    Triton itself finds out which addresses are multiples of 16 bytes and which strides of 16 entries; heads of 8, 24,
    40, 56, 72 or 88 have strides that are multiples of 8. If the compiler does not know, it copies 2 bytes at a time.
    """
    size = 16 // tensors[0].element_size()
    row_strides = [stride for t in tensors for stride in t.stride()[:-1]]
    if all(stride % 16 == 0 for stride in row_strides) or any(stride % size for stride in row_strides):
        return 1
    return size if all(t.stride(-1) == 1 and t.data_ptr() % 16 == 0 for t in tensors) else 1


def tile_sizes(options: Options) -> dict[str, tuple[int, int]]:
    """Return the tensors that the portable kernels load tiles of, and the rows and columns of these."""
    width, value_width = padded_head_dim(options.D), padded_head_dim(options.DV)
    key, value = (options.BLOCK_N, width), (options.BLOCK_N, value_width)
    return {"query": (options.BLOCK_M, width), "key": key, "value": value, "grad_out": (options.BLOCK_M, value_width)}


def fits_tma(t: Tensor) -> bool:
    """Return True if TMA can load a tensor: dense rows, multiples of 16 bytes, no axis without a stride or an entry."""
    steps = [stride * t.element_size() % 16 for stride in t.stride()[:-1]]
    return t.stride(-1) == 1 and not any(steps) and t.data_ptr() % 16 == 0 and min(t.stride()) >= 1 and t.numel() > 0


def can_use_tma(arguments: dict[str, Any], options: Options) -> bool:
    """Return True if TMA can load the tensors that a portable kernel loads tiles of."""
    # A descriptor has no ends of packed sequences or of a sample's keys. A mask of keys hides those beyond.
    if options.VARLEN or (options.LENGTHS and options.MASK != "keys"):
        return False
    return all(fits_tma(arguments[name]) for name in tile_sizes(options) if name in arguments)


def descriptors(arguments: dict[str, Any], options: Options) -> dict[str, Any]:
    """Return descriptors of the tensors that a portable kernel loads tiles of."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    tensors = {name: (arguments[name], size) for name, size in tile_sizes(options).items() if name in arguments}
    return {
        name: TensorDescriptor(t, list(t.shape), list(t.stride()), [1, 1, *size]) for name, (t, size) in tensors.items()
    }


def sigmoid_form(p: Problem | VarlenProblem | KVCacheProblem) -> str:
    """Return the form of σ (activation.py) that a problem requires; "accurate" stands for that of the configuration."""
    if p.fast and not p.normalize and not INTERPRETED and torch.version.hip is None:
        return "fast"
    return "exact" if p.query.dtype is torch.float32 else "accurate"


def softcap_accuracy(p: Problem | VarlenProblem | KVCacheProblem) -> str:
    """Return the accuracy of tanh that a problem requires (``Options.SOFTCAP``)."""
    if not p.softcap:
        return "none"
    # An absolute error of 2e-7 in tanh is one of 2e-7 c in a logit and in the relative error of its weight.
    return "absolute" if p.query.element_size() == 2 and p.softcap <= _LARGEST_CAP else "relative"


def precision(t: Tensor) -> str:
    """Return the precision of a tensor's products: "bf16x3" if PyTorch's settings allow TF32, else "ieee".

    Triton's "tf32" cuts operands off where PyTorch rounds them: gradients had seven times the error of the formula in
    TF32. Three products in bfloat16, of two parts of each operand, have a fiftieth of it (H200, n = 4,096).
    """
    if t.dtype is not torch.float32 or architecture(t.device) < 80:  # 0 for AMD's GPUs
        return "ieee"
    setting = torch.backends.cuda.matmul.fp32_precision
    if setting == "none":
        setting = torch.backends.fp32_precision  # type: ignore[attr-defined]
    return "bf16x3" if setting == "tf32" else "ieee"


def _bias(p: Problem | VarlenProblem, batch: int, heads: int, n: int, m: int) -> BiasArguments:
    packed = isinstance(p, VarlenProblem)
    if p.bias is not None:
        return bias_arg(p.bias, p.query.dtype, batch, heads, 1 if packed else n)
    margin = NORMALIZED_MARGIN if p.normalize else 0.0
    if isinstance(p, VarlenProblem) or p.key_lengths is not None:
        return Bias(None, margin * LOG2E, 0, None, 0.0), (0, 0, 0), "length"
    return _number_bias(-math.log(max(m, 1)) - margin, p.query.dtype)


def _number_bias(number: float, dtype: torch.dtype) -> BiasArguments:
    exact = dtype is not torch.float16 or not math.isfinite(number)
    shift = 0.0 if exact else float(min(max(math.floor(-number * LOG2E), 0), 15))
    return Bias(None, to_float32(-number * LOG2E), 0, None, shift), (0, 0, 0), "number"


def bias_arg(bias: Tensor, dtype: torch.dtype, *size: int) -> BiasArguments:
    """Return the kernels' argument for a bias, 0-d or broadcast to (B, H, N, 1), for weights of a dtype."""
    if not bias.dim():
        return _number_bias(bias.item(), dtype)
    if bias.numel() == 1:
        return Bias(bias, 0.0, 0, bias, 0.0), (0, 0, 0), "scalar"
    shift = None
    if dtype is torch.float16:
        largest = bias.amax() if bias.numel() else bias.new_zeros(())
        shift = (largest.float() * -LOG2E).floor().nan_to_num(0.0).clamp(0, 15)
    b, h, n, _ = broadcast_strides(bias, *size, 1)
    return Bias(bias, 0.0, n if size[-1] > 1 else 0, shift, 0.0), (b, h, n), "tensor"


def mask_arg(mask: Tensor | None, *size: int) -> Mask | None:
    """Return the kernels' argument for a mask broadcast to a size (B, H, N, M)."""
    if mask is None:
        return None
    return Mask(mask.view(torch.uint8) if mask.dtype is torch.bool else mask, *broadcast_strides(mask, *size))


def _visible_keys(p: Problem | VarlenProblem, mask: Mask, batch: int, heads: int, n: int, m: int) -> Tensor | None:
    """Return which keys a bool mask lets all queries and heads of a sample see, (B, M), or None if they differ."""
    if isinstance(p, VarlenProblem) or p.normalize or p.key_lengths is not None or not n * m * heads:
        return None
    if p.attn_mask is None or p.attn_mask.dtype is not torch.bool:
        return None
    same = (mask.q == 0 or n == 1) and (mask.h == 0 or heads == 1)
    return p.attn_mask.expand(batch, heads, n, m)[:, 0, 0] if same else None


def to_float32(x: float) -> float:
    """Return a number rounded to float32, which kernels take; 0 if it is subnormal there."""
    x = ctypes.c_float(x).value
    return 0.0 if abs(x) < torch.finfo(torch.float32).smallest_normal else x
