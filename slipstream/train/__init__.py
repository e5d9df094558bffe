"""Training of drafters for a target: one recipe per kind, exported in the published formats."""
