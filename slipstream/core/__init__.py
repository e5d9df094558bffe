"""The nouns of the engine. Standard library only."""
