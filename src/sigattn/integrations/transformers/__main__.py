"""Command line of transformers for sigmoid models: ``python -m sigattn.integrations.transformers serve FOLDER``."""

from transformers.cli.transformers import main

if __name__ == "__main__":  # the package has registered sigmoid attention
    main()
