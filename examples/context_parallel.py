"""Divide one long sequence over processes, and compare with a single process.

torchrun --nproc-per-node=2 examples/context_parallel.py
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from sigattn import sigmoid_attention
from sigattn.distributed import context_parallel_attention


def main():
    """Compute one part of the attention in this process, and compare."""
    dist.init_process_group("gloo")
    rank, processes = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (processes,))
    torch.manual_seed(0)  # the same sequence everywhere, of which each process has a part
    query, key, value = torch.randn(3, 1, 4, 512 * processes, 64)
    part = slice(512 * rank, 512 * (rank + 1))
    q, k, v = (t[:, :, part].clone().requires_grad_() for t in (query, key, value))
    out = context_parallel_attention(q, k, v, mesh=mesh)
    out.sum().backward()
    whole = sigmoid_attention(query, key, value)[:, :, part]
    print(f"process {rank}: largest difference from one process {(out - whole).abs().max().item():.1e}", flush=True)
    torch.testing.assert_close(out, whole)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
