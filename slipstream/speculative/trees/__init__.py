"""Drafts that are trees of tokens."""
