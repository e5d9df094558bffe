"""Benchmarks: workloads, load generators, measurements and reports."""
