"""Networks of drafters that are no language models: they read the target's features."""
