"""EAGLE-3 heads that give all draft tokens from one pass."""
