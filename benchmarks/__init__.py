"""Benchmarks of co3_flower: one module per stage, each run with ``python -m benchmarks.<name>``."""
