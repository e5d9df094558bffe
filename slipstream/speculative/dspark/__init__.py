"""`dspark`: DFlash with heads that condition each token of a block on the tokens before it."""

from slipstream.speculative.method import CheckpointSigns, Method

_ARCHITECTURES = {"DSparkDraftModel", "Qwen3DSparkModel"}


def _recognise(signs: CheckpointSigns) -> bool:
    named = bool(signs.architectures & _ARCHITECTURES)
    return named or any(name.startswith("markov_head.") for name in signs.names)


METHOD = Method(
    name="dspark",
    module="slipstream.speculative.dspark.network",
    recognise=_recognise,
    library_names=("dspark",),
    is_head=True,
)
