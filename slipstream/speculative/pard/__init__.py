"""Language models that give all draft tokens from one pass (PARD, PARD-2)."""
