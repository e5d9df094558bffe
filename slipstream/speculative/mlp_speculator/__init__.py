"""`mlp_speculator`: a small recurrent network on the target's last hidden state."""

from slipstream.speculative.method import Method

METHOD = Method(
    name="mlp_speculator",
    module="slipstream.speculative.mlp_speculator.network",
    model_types=("mlp_speculator",),
    architectures=("MLPSpeculatorPreTrainedModel",),
    is_head=True,
)
