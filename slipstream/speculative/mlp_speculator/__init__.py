"""`mlp_speculator`: a small recurrent network on the target's last hidden state."""

from slipstream.speculative.method import CheckpointSigns, Method


def _recognise(signs: CheckpointSigns) -> bool:
    return (
        signs.model_type == "mlp_speculator"
        or "MLPSpeculatorPreTrainedModel" in signs.architectures
    )


METHOD = Method(
    name="mlp_speculator",
    module="slipstream.speculative.mlp_speculator.network",
    recognise=_recognise,
    is_head=True,
)
