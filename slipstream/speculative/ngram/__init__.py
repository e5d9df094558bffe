"""`ngram`: what followed the last n-gram of a request in its own text (prompt lookup)."""

from slipstream.speculative.method import Method

METHOD = Method(
    name="ngram",
    module="slipstream.speculative.ngram.drafter",
    without_model=True,
    match_keys=("prompt_lookup_min", "prompt_lookup_max"),
)
