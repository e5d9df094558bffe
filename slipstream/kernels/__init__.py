"""One table of ops: `reference` is plain torch and the truth."""
