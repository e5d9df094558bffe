"""Processes that hold a model together: rank 0 leads and the other ranks follow its steps."""
