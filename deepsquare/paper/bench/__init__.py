"""Benchmarks: candidates measured in interleaved rounds within one run."""
