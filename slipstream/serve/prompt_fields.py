"""Request fields that apply to prompts: truncation, cache salt, adapter and priority."""

from dataclasses import dataclass, replace

from slipstream.core.adapters import NamedAdapter
from slipstream.engine.prompts import EncodedPrompt
from slipstream.serve.errors import bad_request
from slipstream.serve.protocol.sampling import SamplingFields


@dataclass(frozen=True)
class Truncation:
    """Truncates prompts to `most` tokens: the last ones if `keeps_end`, else the first."""

    most: int
    keeps_end: bool

    def cut_text(self, text: str, longest: int) -> str:
        """Cut a text to `longest` characters, to bound the cost of tokenizing it."""
        return text[-longest:] if self.keeps_end else text[:longest]

    def cut(self, prompt: EncodedPrompt) -> EncodedPrompt:
        """Truncate a prompt; if tokens are removed, its `text` becomes None."""
        if len(prompt.token_ids) <= self.most:
            return prompt
        ids = prompt.token_ids
        kept = ids[-self.most :] if self.keeps_end else ids[: self.most]
        return replace(prompt, text=None, token_ids=kept)


def placed(
    prompt: EncodedPrompt, body: SamplingFields, adapter: NamedAdapter | None
) -> EncodedPrompt:
    """Set the request's adapter, priority and cache salt on a prompt."""
    salt, priority = body.cache_salt or "", body.priority or 0
    return replace(prompt, cache_salt=salt, priority=priority, adapter=adapter)


def truncation(
    body: SamplingFields, max_tokens: int | None, max_model_len: int
) -> Truncation | None:
    """The truncation that a request asks for; None if it asks for none.

    Args:
        max_tokens: maximum number of output tokens, for which truncation to -1 leaves room; None
            and 0 count as 1.

    Raises:
        ApiError: no prompt token would be left, or only `truncation_side` is given.
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
