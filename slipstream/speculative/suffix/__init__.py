"""Continuations of the longest suffix that occurred before."""
