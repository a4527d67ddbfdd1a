"""Language, vision, speech and sequence models of the same block, each built from a frozen configuration."""
