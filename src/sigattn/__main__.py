"""Entry point of ``python -m sigattn``, which torchrun needs."""

from sigattn.cli import main

main()
