"""Continuations of an n-gram of the request's own text."""
