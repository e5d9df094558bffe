"""Checkpoints: reading them strictly, and the networks inside."""
