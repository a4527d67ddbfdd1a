"""Language, vision and speech models of the same block, each made from a frozen configuration."""
