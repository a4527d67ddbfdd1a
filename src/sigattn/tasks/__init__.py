"""Training objectives, one per module: each builds its module, computes its loss and evaluates its metrics."""
