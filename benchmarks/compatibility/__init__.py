"""Every architecture of transformers, timm and torchvision: sigmoid attention is exact, or refused by name.

``python -m benchmarks.compatibility LIBRARY`` compares models with references in plain PyTorch (``reference``), and
writes the tables of docs/compatibility.md (``page``).
"""
