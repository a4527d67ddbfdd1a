"""Benchmarks of the operator, its kernels and training: ``python -m benchmarks --help`` lists them.

Each benchmark is a configuration class and a function that takes it, prints tables and writes the results (JSON).
Baselines are in ``baselines``, the timing in ``timing``, and the check before it in ``reference``. ``results`` has the
measurements that the documentation cites, from which ``python -m benchmarks.figures`` draws its figures and tables.
``compatibility`` compares the architectures of other libraries, by a command of its own.
"""
