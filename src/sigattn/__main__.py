"""``python -m sigattn``, as torchrun wants it."""

from sigattn.cli import main

main()
