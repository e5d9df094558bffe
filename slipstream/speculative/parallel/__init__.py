"""What drafters share that give all their tokens from one pass over mask tokens."""

# The id of the mask token in a config.json, in the order in which other engines look for it.
MASK_ID_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")
