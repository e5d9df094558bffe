"""Outputs that begin with a free thought, which may be limited, and go on by a grammar, or freely.

A thought is told from its marks alone, so that no grammar has to allow what it may hold.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.core.structured import Advance, Thought
from slipstream.engine.draft_guide import DraftGuide

_WORD_BITS = 32
_MOST_SPACES = 2  # tokens between the thought and what a grammar begins with


class Phase(Enum):
    """START: the thought may be opened. SPACE: it is closed, and what follows may begin."""

    START = "start"
    THOUGHT = "thought"
    SPACE = "space"
    REST = "rest"


class _State(NamedTuple):
    """Where an output stands.

    Attributes:
        length: tokens in this phase.
        moved: the token that led here went to the grammar.
    """

    phase: Phase
    length: int = 0
    moved: bool = False


@dataclass
class ThoughtRows:
    """What is to be filled in behind the tokens of a draft, as `ThoughtGuide.rows` finds it.

    Attributes:
        at_start: rows that get what the grammar begins with.
        also: tokens that are allowed in such a row, too.
        rest: a row and tokens, from which on the grammar fills in what it allows.
    """

    at_start: list[int] = field(default_factory=list)
    also: dict[int, list[int]] = field(default_factory=dict)
    rest: tuple[int, list[int]] | None = None


class ThoughtGuide(DraftGuide):
    """One sample's place in or behind its thought.

    Args:
        rest: follows the output behind the thought; None if that may be anything.
        ends: end tokens, which no thought holds that something has to follow.
    """

    def __init__(self, thought: Thought, rest: DraftGuide | None, ends: frozenset[int]) -> None:
        super().__init__(ends)
        self._thought, self.rest = thought, rest
        self._states = [_State(Phase.THOUGHT if thought.begun else Phase.START)]

    def advance(self, token: int) -> Advance:
        """Take in a token of the output."""
        state = self._behind(self._states[-1], token)
        if state is None:
            self.problem = "the thought had to be closed, or must not end the output"
            return Advance.REFUSED
        self._states = [state._replace(moved=False)]
        if not state.moved or self.rest is None:
            return Advance.OPEN
        advance, self.problem = self.rest.advance(token), self.rest.problem
        return advance

    def forced(self) -> list[int]:
        """The only tokens that may follow, as far as they are certain."""
        state = self._states[-1]
        if self._due(state):
            return [self._thought.closing]
        return self.rest.forced() if state.phase is Phase.REST and self.rest is not None else []

    def try_token(self, token: int) -> bool:
        """Go one token ahead, if it is allowed; whether it is."""
        state = self._behind(self._states[-1], token)
        if state is None:
            return False
        if state.moved and self.rest is not None and not self.rest.try_token(token):
            return False
        self._states.append(state)
        return True

    def leave(self) -> None:
        """Go back by one token."""
        if self._states.pop().moved and self.rest is not None:
            self.rest.leave()

    @property
    def complete(self) -> bool:
        """Whether nothing can follow."""
        behind = self._states[-1].phase is Phase.REST and self.rest is not None
        return behind and self.rest is not None and self.rest.complete

    def rows(self, masks: Tensor, row: int, tokens: Sequence[int]) -> ThoughtRows:
        """Write what a thought allows; what is left to be done by a grammar.

        Args:
            masks: [rows, words] int32 in which everything is allowed.
            row: of what may come next; what may come behind each of the tokens follows.
        """
        left, state = ThoughtRows(), self._states[-1]
        for place in range(len(tokens) + 1):
            behind = self._behind(state, tokens[place]) if place < len(tokens) else None
            if state.phase is Phase.THOUGHT:
                self._fill(masks[row + place], state)
            elif self.rest is not None:
                if state.phase is not Phase.REST:
                    left.at_start.append(row + place)
                    left.also[row + place] = self._unmoved(state)
                if state.phase is Phase.REST or (behind is not None and behind.moved):
                    left.rest = row + place, [*tokens[place:]]
                    break
            if behind is None:
                break
            state = behind
        if left.at_start and left.rest is None:
            left.rest = left.at_start[-1], []
        return left

    def _behind(self, state: _State, token: int) -> _State | None:
        """The state behind a token, whether the grammar allows it or not; None if no thought may
        hold it."""
        thought, phase = self._thought, state.phase
        if phase is Phase.THOUGHT:
            if token == thought.closing:
                return _State(Phase.REST if self.rest is None else Phase.SPACE)
            if self._due(state) or (self.rest is not None and token in self._ends):
                return None
            return _State(phase, state.length + 1)
        if phase is Phase.START and token == thought.opening:
            return _State(Phase.THOUGHT)
        if token in self._unmoved(state):
            return _State(phase, state.length + 1)
        return _State(Phase.REST, moved=True)

    def _unmoved(self, state: _State) -> list[int]:
        """Tokens that are allowed outside of a thought and do not go to the grammar."""
        spaces, limited = [*self._thought.spaces], self.rest is not None
        if state.phase is Phase.START:
            # If no thought follows, they would be content that the grammar does not have.
            return [*([] if limited else spaces), self._thought.opening]
        return spaces if state.phase is Phase.SPACE and state.length < _MOST_SPACES else []

    def _due(self, state: _State) -> bool:
        """Whether the closing mark has to come."""
        budget = self._thought.budget
        return state.phase is Phase.THOUGHT and budget is not None and state.length >= budget

    def _fill(self, mask: Tensor, state: _State) -> None:
        if self._due(state):
            mask.zero_()
            allow(mask, [self._thought.closing])
        elif self.rest is not None:
            for token in self._ends:
                mask[token // _WORD_BITS] &= ~_bit(token)


def allow(mask: Tensor, tokens: Sequence[int]) -> None:
    """Allow tokens in a mask: [words] int32."""
    for token in tokens:
        mask[token // _WORD_BITS] |= _bit(token)


def _bit(token: int) -> Tensor:
    return torch.tensor(1 << token % _WORD_BITS).to(torch.int32)
