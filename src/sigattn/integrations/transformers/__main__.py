"""Command line of transformers for sigmoid models: ``python -m sigattn.integrations.transformers serve FOLDER``."""

import transformers
from transformers.cli.transformers import main

from sigattn.integrations.transformers.model import SigattnForCausalLM

transformers.SigattnForCausalLM = SigattnForCausalLM  # the server looks a model's class up there, and not by AutoModel

if __name__ == "__main__":  # the package has registered sigmoid attention
    main()
