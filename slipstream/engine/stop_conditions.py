"""Where an output ends."""

from collections.abc import Sequence

from slipstream.core.request import FinishReason, Request
from slipstream.core.structured import Advance

REPEATS = "repetition_detected"
# min_tokens cannot ask for tokens after a text that is complete by its grammar.
COMPLETE_EARLY = "the grammar was complete before min_tokens"
NOT_FINITE = (
    "the model's logits are not finite (NaN or infinity), or all 0: weights of its checkpoint are "
    "broken, or its numbers overflow in this dtype; check the checkpoint, or load it with dtype "
    "float32"
)

Ending = tuple[FinishReason, str | int | None]


def append_output(request: Request, token_ids: Sequence[int], max_model_len: int) -> Ending | None:
    """Append tokens up to the first that ends the output; how it ended, if it did."""
    guide = request.guide
    for token in token_ids:
        advance = Advance.OPEN
        if guide is not None:
            advance = guide.advance(token)
            if advance is Advance.REFUSED:
                return FinishReason.ERROR, guide.problem
        # A stop token is ignored among the first min_tokens tokens.
        stops = (
            token in request.stop_token_ids
            and request.num_output_tokens >= request.params.min_tokens
        )
        request.token_ids.append(token)
        if stops:
            named = token in request.params.stop_token_ids
            return FinishReason.STOP, token if named else None
        if advance is Advance.COMPLETE:
            early = request.num_output_tokens < request.params.min_tokens
            return FinishReason.STOP, COMPLETE_EARLY if early else None
        if _repeats(request):
            return FinishReason.STOP, REPEATS
        if request.num_output_tokens >= request.max_tokens or request.num_tokens >= max_model_len:
            return FinishReason.LENGTH, None
    return None


def _repeats(request: Request) -> bool:
    params, detection = request.params, request.params.repetition_detection
    if detection is None or request.num_output_tokens < params.min_tokens:
        return False
    begin = max(request.num_prompt_tokens, request.num_tokens - detection.most_tokens)
    return detection.found(request.token_ids[begin:])
