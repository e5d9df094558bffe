"""From logits to tokens: processors, sampling, verification."""
