"""Constants of the functions of rows (``sigattn.ops.rows``), which their kernels share."""

from __future__ import annotations

MAX_LOG_SCALE = 5.0  # bound of |log scale|, e⁵ ≈ 150
EPS = 1e-6  # added to a row's norm
MAX_DIRECTIONS = 8  # of a quadratic form; with 24 converted models are hardly better (docs/log.md), and slower
