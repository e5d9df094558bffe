"""Networks of drafters that are no language models of their own: they read the target's features."""
