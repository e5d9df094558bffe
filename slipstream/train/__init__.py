"""Training of drafters for a target: one recipe per kind, exports in the published formats."""
