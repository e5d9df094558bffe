"""Refuses requests that can never be served, with the numbers and the remedy."""

from slipstream.cache.block_manager import BlockManager
from slipstream.core.errors import UsageError, counted
from slipstream.core.request import Request
from slipstream.core.step_form import StepLimits


def check_fits(request: Request, limits: StepLimits, blocks: BlockManager) -> None:
    """Raise UsageError when the request could not run to its end, even alone."""
    if request.priority and not limits.by_priority:
        raise UsageError(
            "priority needs scheduling_policy priority (--scheduling-policy priority), and this "
            "engine serves in order of arrival; leave it out"
        )
    _check_choice(request)
    _check_lengths(request, limits)
    _check_blocks(request, limits, blocks)
    _check_drafts(request.num_speculative_tokens, limits)


def _check_choice(request: Request) -> None:
    """Raise UsageError if no token would be allowed."""
    allowed = request.params.allowed_token_ids
    if allowed is None:
        return
    left = set(allowed) - {word[0] for word in request.bad_words if len(word) == 1}
    if request.params.min_tokens:
        left -= request.stop_token_ids
    if not left:
        raise UsageError(
            "allowed_token_ids leave no token once bad_words, and stop tokens before min_tokens, "
            "are ruled out; allow more tokens"
        )


def _check_drafts(wanted: int, limits: StepLimits) -> None:
    most = limits.num_speculative_tokens
    if wanted <= most:
        return
    remedy = "a larger num_speculative_tokens"
    if limits.adaptive:
        remedy = f'a num_speculative_tokens of {wanted} in place of "auto", which goes up to {most}'
    elif not most:
        remedy = "a drafter"
    raise UsageError(
        f"num_speculative_tokens is {wanted}, but this engine drafts at most "
        f"{counted(most, 'token')} a step; ask for fewer, or start the engine with {remedy}"
    )


def _check_lengths(request: Request, limits: StepLimits) -> None:
    longest = limits.max_model_len - 1
    if request.num_prompt_tokens == 0:
        raise UsageError("the prompt is empty; give at least one token")
    if request.num_prompt_tokens > longest:
        why, remedy = "", "raise max_model_len"
        if limits.cache_bounds_length:
            why = " since the KV cache holds no more"
            remedy = "give the cache more memory (kv_cache_memory, num_kv_blocks)"
        raise UsageError(
            f"the prompt has {counted(request.num_prompt_tokens, 'token')}, but max_model_len is "
            f"{limits.max_model_len}{why}, which leaves room for "
            f"{counted(longest, 'prompt token')} and one output token; shorten the prompt, or "
            f"{remedy}"
        )


def _check_blocks(request: Request, limits: StepLimits, blocks: BlockManager) -> None:
    total = min(request.num_prompt_tokens + request.max_tokens, limits.max_model_len)
    needed = blocks.blocks_for(total)
    if needed > blocks.num_blocks:
        raise UsageError(
            f"the request needs {counted(needed, 'block')} of KV cache for "
            f"{counted(total, 'token')} ({request.num_prompt_tokens} of the prompt, "
            f"{request.max_tokens} of max_tokens), "
            f"but the cache has {counted(blocks.num_blocks, 'block')} for "
            f"{blocks.num_blocks * blocks.block_size} tokens; lower max_tokens, shorten the prompt "
            "or give the cache more memory"
        )
