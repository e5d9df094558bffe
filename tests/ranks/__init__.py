"""Engines of several processes."""
