"""Sigmoid attention in other libraries: Hugging Face transformers and lm-evaluation-harness, one module each."""
