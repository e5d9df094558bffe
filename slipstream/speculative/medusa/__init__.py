"""`medusa`: heads on the target's last hidden state, one for each position after the next token.

The likeliest or sampled tokens of the heads form a chain; candidate trees are not supported.
"""

from slipstream.speculative.medusa.names import names_medusa
from slipstream.speculative.method import Method

METHOD = Method(
    name="medusa",
    module="slipstream.speculative.medusa.network",
    recognise=lambda signs: names_medusa(signs.config, signs.names),
    weight_files=("medusa_lm_head.safetensors", "medusa_lm_head.pt"),
    library_names=("medusa",),
    is_head=True,
)
