"""MLP speculators."""
