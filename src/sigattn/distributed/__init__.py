"""Distributed training and inference: data, tensor and context parallelism."""
