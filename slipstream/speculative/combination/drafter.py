"""`combination`: several drafters in one step, each request drafted for by the first that can.

    {"drafters": [{"method": "ngram"}, {"model": "demo/draft"}], "num_speculative_tokens": 4}

All but the last look guesses up (`ngram`, `suffix`, `custom`) and have none where nothing matches,
or too few tokens do; the last guesses for everybody else. Drafts of all lengths stand in one padded
block, and each request is judged by the q of whoever drafted for it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from slipstream.core.errors import UsageError
from slipstream.core.wording import counted
from slipstream.speculative.catalogue import METHODS
from slipstream.speculative.combination.combined import CombinedDrafter, Member
from slipstream.speculative.drafter import (
    Drafter,
    DrafterLimits,
    DrafterResources,
    LoadedDrafter,
)
from slipstream.speculative.loading import DEFAULT_NUM_SPECULATIVE_TOKENS, Choice, choose
from slipstream.speculative.options import Options, TargetModel

# Of drafters that are asked before another: behind shorter matches the demo draft guesses better.
DEFAULT_MIN_MATCH = 8


@dataclass(frozen=True)
class CombinationConfig:
    """The drafters in their order.

    Attributes:
        counts: how many tokens each guesses at most.
        num_speculative_tokens: the most that any may guess.
    """

    members: tuple[Choice, ...]
    counts: tuple[int, ...]
    num_speculative_tokens: int


def read_options(options: Options) -> CombinationConfig:
    """Each drafter takes the options that it has alone, and `min_match` if it looks guesses up."""
    listed = options.take("drafters")
    if not isinstance(listed, list | tuple) or len(listed) < 2:
        raise UsageError(
            "speculative_config: drafters must be a list of two or more, such as "
            '[{"method": "ngram"}, {"model": "..."}]'
        )
    last = len(listed) - 1
    members = [_read_member(given, index, index == last) for index, given in enumerate(listed)]
    whole = options.peek("num_speculative_tokens")
    whole = whole if isinstance(whole, int) and whole > 0 else None
    of_last = members[-1].given or whole or members[-1].proposed or DEFAULT_NUM_SPECULATIVE_TOKENS
    most = max(of_last, *(member.given or 0 for member in members))
    if whole is not None and most > whole:
        raise UsageError(
            f"speculative_config: one of drafters is to guess {most} tokens and all together "
            f"{whole}; raise the num_speculative_tokens beside drafters, or lower the one inside"
        )
    most = whole or most
    counts = (*(member.given or most for member in members[:-1]), of_last)
    return CombinationConfig(tuple(members), counts, most)


def _read_member(given: Any, index: int, is_last: bool) -> Choice:
    """One drafter of the list."""
    if not isinstance(given, Mapping):
        raise UsageError(
            f"speculative_config: each of drafters must be a mapping of options, not {given!r}"
        )
    options = Options(given)
    if options.peek("drafters") is not None or options.peek("method") == "combination":
        raise UsageError("speculative_config: drafters holds a combination; list its drafters")
    if options.peek("num_speculative_tokens") == 0:
        raise UsageError("speculative_config: a drafter with num_speculative_tokens 0; take it out")
    _fill_min_match(options, not is_last)
    choice = choose(options)
    options.finish(f"{choice.name} (number {index + 1} of drafters)")
    return choice


def _fill_min_match(options: Options, has_others_behind: bool) -> None:
    """`min_match` is the same key for all that look guesses up, and has a default of its own where
    other drafters come behind."""
    name = options.peek("method") or options.peek("model")
    method = METHODS.get(name) if isinstance(name, str) else None
    if method is None or method.match_keys is None:
        return
    shortest_key, longest_key = method.match_keys
    asked = options.take_int("min_match", None)
    if asked is not None and options.peek(shortest_key) is not None:
        raise UsageError(
            f"speculative_config: min_match is {shortest_key} for method {name}; give one of them"
        )
    longest = options.peek(longest_key)
    default = min(DEFAULT_MIN_MATCH, longest) if isinstance(longest, int) else DEFAULT_MIN_MATCH
    if asked is not None or has_others_behind:
        options.fill(shortest_key, default if asked is None else asked)


def load(config: CombinationConfig, target: TargetModel) -> LoadedDrafter:
    """Load every drafter; UsageError for an order in which some would never be asked."""
    loaded = [member.load(target) for member in config.members]
    names = [member.name for member in config.members]
    for name, member in zip(names[:-1], loaded[:-1], strict=True):
        if not member.limits.looks_up:
            raise UsageError(
                f"speculative_config: {name} has a guess for every request, so that the drafters "
                "behind it are never asked; put it last"
            )
    on_device = [member.limits.on_device for member in loaded]
    if on_device != sorted(on_device):
        late = names[len(names) - 1 - on_device[::-1].index(False)]
        raise UsageError(
            f"speculative_config: {late} guesses on the host, before the others begin; put it first"
        )
    most, told = loaded[-1].limits.max_speculative_tokens, config.members[-1].given
    if most is not None and told is not None and told > most:
        raise UsageError(
            f"{names[-1]} guesses at most {counted(most, 'token')} a step; lower its "
            "num_speculative_tokens"
        )
    counts = (*config.counts[:-1], min(config.counts[-1], most or config.counts[-1]))
    return _combine(loaded, counts)


def _combine(loaded: Sequence[LoadedDrafter], counts: Sequence[int]) -> LoadedDrafter:
    """Only the last may keep something in the blocks."""
    last, limits = loaded[-1], [member.limits for member in loaded]

    def build(resources: DrafterResources) -> Drafter:
        lent = replace(resources, has_rivals=True)
        members = [
            Member(member.build(lent), member.limits, count)
            for member, count in zip(loaded, counts, strict=True)
        ]
        count = resources.num_speculative_tokens
        return CombinedDrafter(members, resources.state, resources.captured, count)

    return LoadedDrafter(
        build=build,
        limits=DrafterLimits(
            drafts_behind_prompt=all(it.drafts_behind_prompt for it in limits),
            cache_identity=last.limits.cache_identity,
            on_device=all(it.on_device for it in limits),
            keeps_probabilities=last.limits.keeps_probabilities,
            looks_up=last.limits.looks_up,
        ),
        needs=last.needs,
        layout=last.layout,
    )
