"""Shared parts of drafting heads: checkpoints, configs, loading, and drafters over features."""
