"""Assistants that read the target's cache, as Gemma 4 has them."""
