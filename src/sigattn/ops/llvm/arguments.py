"""Arguments of the kernels: one structure for all, which the host fills and the kernels read."""

from ctypes import Structure, c_float, c_int64, c_void_p

ANYWHERE = 1 << 40  # a window side without a limit
FORWARD_ROWS = 192  # queries of a task of the kernel "forward"
BACKWARD_ROWS = 96  # queries of a block, whose weights and gradients stay in the cache for dV and dK


class Strided(Structure):
    """Tensor (B, H, N, D) with contiguous rows: address and strides.

    Strides are in words of 32 bits if the kernels read the tensor, in elements if they write it.
    """

    _fields_ = [("data", c_void_p), ("batch_stride", c_int64), ("head_stride", c_int64), ("row_stride", c_int64)]


class KernelArguments(Structure):
    """Arguments of a kernel. Fields that a call does not need are 0.

    B samples, H query heads, Hkv key heads, N queries, M keys; "tiles of M" is M rounded up to a multiple of a tile.
    Pairs are rows of bfloat16 in pairs (VNNI's layout), with room for an even number of them.
    """

    _fields_ = [
        ("counter", c_int64),  # number of the next task
        ("tasks", c_int64),  # number of tasks
        ("workers", c_int64),  # number of threads that have begun
        # sizes and options
        ("scale", c_float),  # factor of Q Kᵀ
        ("heads", c_int64),  # H
        ("heads_per_kv", c_int64),  # query heads that share a key head
        ("n", c_int64),  # N
        ("m", c_int64),  # M
        ("head_dim", c_int64),  # of query and key, a multiple of a vector of words
        ("value_dim", c_int64),  # of value and output, a multiple of a vector of words
        ("left", c_int64),  # query i sees keys from i - left on …
        ("right", c_int64),  # … to i + right; ANYWHERE for no limit
        ("query_offset", c_int64),  # position of the first query
        ("alibi", c_int64),  # 1 with slopes
        ("score_sums_size", c_int64),  # sums of dS for each query: 0, 1 (bias) or 3 (bias and both slopes)
        ("splits", c_int64),  # parts of a head's keys in the backward pass, a task for each
        ("part_size", c_int64),  # largest number of queries in a run of the kernel "backward" …
        ("first_query", c_int64),  # … and the first of them
        ("query_group", c_int64),  # queries of a run that the kernel "backward" multiplies with …
        ("key_group", c_int64),  # … so many keys of a split before the next ones
        ("packs_keys", c_int64),  # 1 if the kernel "forward" packs the keys itself
        ("bias_value", c_float),  # the bias if it is a number; ``bias`` points here
        ("dropout", c_int64),  # 1 with dropout
        ("keep_from", c_int64),  # smallest hash of a weight that dropout keeps
        ("keep_scale", c_float),  # factor of the weights that dropout keeps
        ("saves", c_int64),  # 1 if the forward pass writes ``weights``, or the backward pass reads them
        ("normalizes", c_int64),  # 1 if the forward pass divides each row by the sum of its weights
        ("has_small_sum", c_float),  # becomes 1 if a sum is below SMALLEST_SUM; ``small_sum`` points here
        ("zero", c_float),  # 0, to which ``row_terms`` points if there are none
        ("mask_itemsize", c_int64),  # 1 for a mask of bool, 4 for float32, 0 for none
        # tensors
        ("query", Strided),
        ("key", Strided),
        ("value", Strided),
        ("bias", Strided),  # float32, (B, H, N)
        ("row_terms", Strided),  # float32, (B, H, N): what the backward pass subtracts from each row of dP
        ("mask", Strided),  # (B, H, N, tiles of M), strides in bytes
        ("out", Strided),
        ("grad_out", Strided),
        ("grad_key", Strided),
        ("grad_value", Strided),
        ("grad_query", Strided),
        ("slopes", c_void_p),  # float32, (B, H, 2)
        ("slopes_batch_stride", c_int64),
        ("lengths", c_void_p),  # int64, (B,); ``m`` if there are none
        ("lengths_batch_stride", c_int64),
        # memory of a call: that of W threads is used again for each task; "heads" is W if ``packs_keys``, else B · Hkv
        ("packed_keys", c_void_p),  # forward: (heads, tiles of M, head_dim), backward: (W, tile, head_dim); transposed
        ("packed_values", c_void_p),  # (W, tile, value_dim), transposed
        ("key_pairs", c_void_p),  # (W, tile, head_dim)
        ("value_pairs", c_void_p),  # (heads, tiles of M, value_dim)
        ("query_pairs", c_void_p),  # (W, heads_per_kv, part_size, head_dim)
        ("grad_out_pairs", c_void_p),  # (W, heads_per_kv, part_size, value_dim)
        # results before they are rounded or added, float32; the last three are for splits > 1, else for splits = 1
        ("out_sums", c_void_p),  # (W, FORWARD_ROWS, value_dim)
        ("grad_query_sums", c_void_p),  # (splits, B, H, part_size, head_dim), else (W, heads_per_kv, part_size, …)
        ("grad_key_sums", c_void_p),  # (B, Hkv, M, head_dim), else (W, key_group, head_dim)
        ("grad_value_sums", c_void_p),  # (B, Hkv, M, value_dim), else (W, key_group, value_dim)
        ("score_sums", c_void_p),  # float32, (splits, B, H, N, 3)
        ("weight_sums", c_void_p),  # float32, (B, H, N, 2): sum of each row's weights, and its lift, 0
        ("small_sum", c_void_p),  # ``has_small_sum``
        ("row_hashes", c_void_p),  # of dropout, int32, (B, H, N)
        ("column_hashes", c_void_p),  # of dropout, int32, (tiles of M)
        ("weights", c_void_p),  # saved, (B, H, N, tiles of M); only where windows let a query see a key
    ]
