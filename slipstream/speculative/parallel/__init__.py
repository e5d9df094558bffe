"""Shared parts of drafters that predict all tokens in one pass over mask tokens."""

# Config keys of the mask token's id, in the order in which other engines look them up.
MASK_ID_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")
# Those of the number of draft tokens per pass that a drafter was trained for.
TRAINED_KEYS = ("para_num", "num_depths")
