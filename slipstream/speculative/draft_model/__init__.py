"""Smaller language models as drafters."""
