"""Benchmarks: contestants measured in turns within one run."""
