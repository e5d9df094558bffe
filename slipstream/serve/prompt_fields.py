"""What a request says of its prompts: how much of them is left, who shares them, who goes first."""

from dataclasses import dataclass, replace

from slipstream.core.adapters import NamedAdapter
from slipstream.engine.prompts import EncodedPrompt
from slipstream.serve.errors import bad_request
from slipstream.serve.protocol.sampling import SamplingFields


@dataclass(frozen=True)
class Truncation:
    """Cuts prompts to `most` tokens; of longer ones the end is kept, or the beginning."""

    most: int
    keeps_end: bool

    def cut_text(self, text: str, longest: int) -> str:
        """At most `longest` characters, which more tokens than are kept cannot fill."""
        return text[-longest:] if self.keeps_end else text[:longest]

    def cut(self, prompt: EncodedPrompt) -> EncodedPrompt:
        """The prompt; one that is cut has no text of its own any more."""
        if len(prompt.token_ids) <= self.most:
            return prompt
        ids = prompt.token_ids
        kept = ids[-self.most :] if self.keeps_end else ids[: self.most]
        return replace(prompt, text=None, token_ids=kept)


def placed(
    prompt: EncodedPrompt, body: SamplingFields, adapter: NamedAdapter | None
) -> EncodedPrompt:
    """The prompt with the request's adapter, priority and salt."""
    salt, priority = body.cache_salt or "", body.priority or 0
    return replace(prompt, cache_salt=salt, priority=priority, adapter=adapter)


def truncation(
    body: SamplingFields, max_tokens: int | None, max_model_len: int
) -> Truncation | None:
    """How the request's prompts are cut; None where they are not.

    Args:
        max_tokens: that the output may have, for which -1 leaves room; at least one.

    Raises:
        ApiError: nothing would be left.
    """
    most, side = body.truncate_prompt_tokens, body.truncation_side
    if most is None:
        if side is not None:
            raise bad_request("truncation_side goes with truncate_prompt_tokens", "truncation_side")
        return None
    if most == -1:
        most = max_model_len - max(1, max_tokens or 1)
    if most < 1:
        raise bad_request(
            "truncate_prompt_tokens leaves nothing of the prompt; keep at least one token, or give "
            "-1 and a smaller max_tokens",
            "truncate_prompt_tokens",
        )
    return Truncation(most, side != "right")
