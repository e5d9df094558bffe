"""`ngram`: the tokens after an earlier occurrence of a text's last n-gram (prompt lookup)."""

from slipstream.speculative.method import MOST_LOOKED_UP, Method

METHOD = Method(
    name="ngram",
    module="slipstream.speculative.ngram.drafter",
    without_model=True,
    match_keys=("prompt_lookup_min", "prompt_lookup_max"),
    most_chosen=MOST_LOOKED_UP,
)
