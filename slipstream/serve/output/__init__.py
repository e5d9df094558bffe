"""Formats of whole answers: what of an answer is reasoning, content, or a tool call."""
