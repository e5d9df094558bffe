"""`draft_model`: drafts with any smaller language model."""

from slipstream.speculative.method import Method

METHOD = Method(
    name="draft_model",
    module="slipstream.speculative.draft_model.drafter",
    recognise=lambda signs: True,  # the fallback: all other methods are tried before
)
