"""The demo (``sigattn demo``), and the pages and pictures of the commands' reports."""

from sigattn.demo.training import DemoConfig, train_models

__all__ = ["DemoConfig", "train_models"]
