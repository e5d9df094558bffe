"""`suffix`: what followed the longest suffix that occurred before (SuffixDecoding)."""

from slipstream.speculative.method import MOST_LOOKED_UP, Method

METHOD = Method(
    name="suffix",
    module="slipstream.speculative.suffix.drafter",
    without_model=True,
    match_keys=("suffix_decoding_min_match", "suffix_decoding_max_tree_depth"),
    most_chosen=MOST_LOOKED_UP,
)
