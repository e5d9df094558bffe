"""`dspark`: DFlash with heads that condition each token of a block on the tokens before it."""

from slipstream.speculative.method import MOST_AT_ONCE, Method

METHOD = Method(
    name="dspark",
    module="slipstream.speculative.dspark.network",
    architectures=("DSparkDraftModel", "Qwen3DSparkModel"),
    recognise=lambda signs: signs.has_tensors("markov_head."),
    library_names=("dspark",),
    is_head=True,
    most_chosen=MOST_AT_ONCE,
)
