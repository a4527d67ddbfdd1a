"""Many processes: what is gathered, sharded and split between them."""
