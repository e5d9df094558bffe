"""Towers that read images, which are transformers' own, and what models want around images."""
