"""Structured fuzzer of the payload decoder: ``python -m tests.fuzz --cases 20000 --seed 1``."""
