"""Checkpoints whose matrices are stored in fewer bits: one file for each format."""
