"""What models are trained for: one objective, with its loss and its metrics, in each file."""
