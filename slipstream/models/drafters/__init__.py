"""Networks of drafters that are no language models: they read features of the target."""
