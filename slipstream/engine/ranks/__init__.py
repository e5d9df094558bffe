"""Tensor parallelism over processes: rank 0 leads and the other ranks follow its steps."""
