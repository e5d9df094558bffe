"""Tool calls in the formats of the model families."""
