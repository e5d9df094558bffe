"""What thoughts and the grammars after them allow, along drafts and step by step."""

import random
from pathlib import Path

import pytest
import torch

from slipstream.core.errors import UsageError
from slipstream.core.structured import Advance, StructuredOutput, Thought
from slipstream.engine.draft_guide import DraftGuide, GuidedDraft
from slipstream.engine.grammar import Grammars
from slipstream.engine.thought_guide import ThoughtGuide
from slipstream.models.tokenizer import Tokenizer
from tests.tokenizers import write_byte_tokenizer

END, OPEN, CLOSE, A, B, SPACE = range(6)
PIECES = ["<", ">", "a", "b", "\n", "ab"]
AB = 6


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    tokenizer = Tokenizer(write_byte_tokenizer(tmp_path_factory.mktemp("words"), PIECES))
    return Grammars(tokenizer, 7, (END,))


def guide_of(
    grammars: Grammars, begun: bool, budget: int | None = None, regex: str | None = "[ab]{2}a"
) -> ThoughtGuide:
    thought = Thought(opening=OPEN, closing=CLOSE, begun=begun, spaces=[SPACE], budget=budget)
    wish = StructuredOutput(regex=regex, thought=thought)
    grammars.compile(wish)
    guide = grammars.guide(wish, frozenset([END]))
    assert isinstance(guide, ThoughtGuide)
    return guide


def allowed(grammars: Grammars, guide: DraftGuide, tokens: list[int]) -> list[set[int]]:
    """Behind each token of a draft; a row that nothing reaches allows everything."""
    masks = grammars.masks(len(tokens) + 1)
    grammars.fill(masks, [(guide, 0, tokens)])
    bits = masks.unsqueeze(-1) >> torch.arange(7) & 1
    return [{token for token in range(7) if row[0, token]} for row in bits]


ALL = set(range(7))


def test_what_is_allowed_where(grammars: Grammars) -> None:
    free, due = ALL - {END}, {CLOSE}
    first = {A, B, AB}
    following = [first | {SPACE}, first | {SPACE}, first, {A, B}, {A}]
    tokens = [B, SPACE, CLOSE, SPACE, SPACE, A, B]
    assert allowed(grammars, guide_of(grammars, True, 2), tokens) == [free, free, due, *following]
    found = allowed(grammars, guide_of(grammars, False, 0), [OPEN, CLOSE, A])
    assert found == [first | {OPEN}, due, following[0], {A, B}]
    # Without a grammar anything may follow, and a thought may end the output.
    found = allowed(grammars, guide_of(grammars, False, 1, None), [SPACE] * 3 + [OPEN, A, CLOSE, A])
    assert found == [ALL] * 5 + [due, ALL, ALL]
    assert allowed(grammars, guide_of(grammars, False, 0, None), [A, OPEN, A]) == [ALL] * 4


@pytest.mark.parametrize("regex", ["[ab]{2}a", None])
@pytest.mark.parametrize("begun", [True, False])
@pytest.mark.parametrize("budget", [None, 0, 2])
def test_drafts_are_read_as_outputs_are(
    grammars: Grammars, begun: bool, budget: int | None, regex: str | None
) -> None:
    generator = random.Random(5)
    for _ in range(60):
        text = generator.choice(([], [OPEN], [SPACE, OPEN, A], [OPEN, A, CLOSE], [OPEN, CLOSE]))
        tokens = [*text, *generator.choices(range(1, 7), k=5)]
        ahead = guide_of(grammars, begun, budget, regex)
        rows = allowed(grammars, ahead, tokens)
        for again in range(2):  # looking ahead leaves no trace
            certain = bool(again)
            path = ahead.follow(tokens, len(tokens), certain)
            assert path == ahead.follow(tokens, len(tokens), certain)
        one = guide_of(grammars, begun, budget, regex)
        for place, token in enumerate(tokens):
            (now,) = allowed(grammars, one, [])
            assert rows[place] == now, (tokens, place)
            assert ahead.try_token(token) == (token in now)
            if token not in now:
                assert path.token_ids[:place] == tokens[:place] or True in path.forced
                assert one.advance(token) is Advance.REFUSED
                assert one.problem
                break
            one.advance(token)
        else:
            assert rows[-1] == allowed(grammars, one, [])[0]
            place = len(tokens)
        for _ in range(place):
            ahead.leave()
        assert allowed(grammars, ahead, tokens) == rows


def test_the_closing_mark_is_drafted(grammars: Grammars) -> None:
    path = guide_of(grammars, True, 1).follow([B, B, B], 5, False)
    assert path == GuidedDraft([B, CLOSE], [False, True], 1)
    path = guide_of(grammars, True, 1, None).follow([B, B, B], 5, True)
    assert path == GuidedDraft([B, CLOSE], [False, True], 1)
    # The drafter's guess is kept.
    path = guide_of(grammars, True, 1).follow([B, CLOSE, A], 5, False)
    assert path == GuidedDraft([B, CLOSE, A], [False, True, False], 3)
    path = guide_of(grammars, True, 1).follow([B, CLOSE, A, B], 5, False)
    assert path == GuidedDraft([B, CLOSE, A, B, A], [False, True, False, False, True], 4)


def test_an_output_is_complete_where_its_grammar_is(grammars: Grammars) -> None:
    guide = guide_of(grammars, True)
    told = [guide.advance(token) for token in (B, CLOSE, SPACE, AB, A)]
    assert told == [Advance.OPEN] * 4 + [Advance.COMPLETE]
    assert guide_of(grammars, True).advance(END) is Advance.REFUSED
    free = guide_of(grammars, True, 3, None)
    assert [free.advance(token) for token in (A, CLOSE, OPEN, END)] == [Advance.OPEN] * 4


def test_a_limit_needs_no_grammar(tmp_path: Path) -> None:
    grammars = Grammars(None, 7, (END,))
    assert allowed(grammars, guide_of(grammars, True, 0, None), [CLOSE]) == [{CLOSE}, ALL]
    with pytest.raises(UsageError, match="exactly one"):
        StructuredOutput()
