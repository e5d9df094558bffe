"""Chooses the number of draft tokens, from the costs of steps and acceptance rates."""
