"""Distributed training and inference: data, tensor and context parallelism."""

from sigattn.distributed.process_mesh import ProcessMesh, init_process_mesh, shutdown
from sigattn.distributed.sequence_sharding import SequenceSharding
from sigattn.distributed.sharded_attention import ContextParallelShard, context_parallel, context_parallel_attention
from sigattn.distributed.sharded_cache import sharded_cache_attention

__all__ = [
    "ContextParallelShard", "ProcessMesh", "SequenceSharding", "context_parallel", "context_parallel_attention",
    "init_process_mesh", "sharded_cache_attention", "shutdown",
]  # fmt: skip
