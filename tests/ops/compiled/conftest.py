"""Tests of compiled kernels, collected only in a process without TRITON_INTERPRET=1."""

import importlib.util
import os

if os.environ.get("TRITON_INTERPRET") == "1" or importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]
