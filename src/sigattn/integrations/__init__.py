"""Sigmoid attention in other libraries: Hugging Face transformers, timm and lm-evaluation-harness, one module each."""
