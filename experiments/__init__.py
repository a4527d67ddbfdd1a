"""The paper's figures and tables as experiments: ``python -m experiments --list`` lists them.

``registry.EXPERIMENTS`` has every experiment, by name.
"""
