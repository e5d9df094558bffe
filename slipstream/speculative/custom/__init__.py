"""Drafters of the user's own."""
