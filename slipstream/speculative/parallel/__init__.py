"""What drafters share that give all their tokens from one pass over mask tokens."""
