"""Drafting in token trees."""
