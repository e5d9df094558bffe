"""Sampling state, sampling and verification of drafts, masks of logits, and logprobs."""
