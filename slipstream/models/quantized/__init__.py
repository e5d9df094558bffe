"""Formats of quantised checkpoints, one file each."""
