"""Heads for a real model, from its own answers to the prompts of ShareGPT."""
