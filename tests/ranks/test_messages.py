"""What a follower makes of the leader's messages."""

from typing import Any

from slipstream.core.batch import Batch, ScheduledRequest
from slipstream.core.request import Request
from slipstream.core.sampling_params import SamplingParams
from slipstream.core.structured import Advance, StructuredOutput
from slipstream.engine.ranks.messages import GuideElsewhere, Reader, Writer


class Walk:
    """A grammar that allows everything."""

    problem = ""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def advance(self, token: int) -> Advance:
        self.tokens.append(token)
        return Advance.OPEN


def request(name: str, regex: str) -> Request:
    params = SamplingParams(structured=StructuredOutput(regex=regex))
    made = Request(name, [1, 2], params, 0, frozenset(), 9, 0, 0)
    made.guide = Walk()
    return made


def planned(requests: list[Request], ranks: list[int]) -> Batch:
    items = (
        ScheduledRequest(it, 0, 1, 0, [slot], False, True, rank=rank)
        for slot, (it, rank) in enumerate(zip(requests, ranks, strict=True))
    )
    return Batch(tuple(items))


def test_a_rank_walks_the_grammars_of_its_own_requests() -> None:
    """A request that moves from another rank is walked from the beginning of its output."""
    compiled: list[str | None] = []

    def make(structured: StructuredOutput, stop_token_ids: frozenset[int]) -> Any:
        compiled.append(structured.regex)
        return Walk()

    writer, reader = Writer(), Reader(1)
    reader.make_guide = make
    requests = [request("a", "x*"), request("b", "y*")]

    def told(ranks: list[int]) -> list[Any]:
        batch = reader.read(writer.write(planned(requests, ranks)))
        return [item.request.guide for item in batch.requests]

    first, second = told([0, 1])
    assert isinstance(first, GuideElsewhere)
    assert (compiled, second.tokens) == (["y*"], [])
    for number, it in enumerate(requests):
        it.token_ids.append(10 + number)
    assert told([0, 1]) == [first, second]
    assert second.tokens == [11]
    requests[0].token_ids.append(12)
    first, again = told([1, 1])
    assert (compiled, first.tokens, again.tokens) == (["y*", "x*"], [10, 12], [11])
