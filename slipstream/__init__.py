"""LLM inference built around speculative decoding."""
