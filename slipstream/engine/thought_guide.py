"""Outputs that begin with unconstrained reasoning, whose length may be limited.

After the reasoning the output follows a grammar, or is free. Reasoning is recognised by its marks,
so grammars need not allow for it.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.core.structured import Advance, Thought
from slipstream.engine.draft_guide import DraftGuide

WORD_BITS = 32
_MOST_SPACES = 2  # tokens between the thought and what a grammar begins with


class Phase(Enum):
    """Where an output is: before its thought, in it, in whitespace after it, or in the rest."""

    START = "start"
    THOUGHT = "thought"
    SPACE = "space"
    REST = "rest"


class _State(NamedTuple):
    """The state of an output.

    Attributes:
        length: tokens in this phase.
        moved: the grammar consumed the token that led here.
    """

    phase: Phase
    length: int = 0
    moved: bool = False


@dataclass
class ThoughtRows:
    """The masks after the tokens of a draft that the grammar has to fill in.

    Attributes:
        at_start: rows that get the mask of the grammar's start.
        also: further tokens that are allowed in such a row.
        rest: the first row of the grammar proper, and the draft tokens that follow it.
    """

    at_start: list[int] = field(default_factory=list)
    also: dict[int, list[int]] = field(default_factory=dict)
    rest: tuple[int, list[int]] | None = None


class ThoughtGuide(DraftGuide):
    """The state of a sample with a thought.

    Args:
        rest: the guide of the output after the thought; None if that is free.
        ends: end tokens; not allowed in a thought that a grammar follows.
    """

    def __init__(self, thought: Thought, rest: DraftGuide | None, ends: frozenset[int]) -> None:
        super().__init__()
        self._thought, self.rest, self._ends = thought, rest, ends
        self._states = [_State(Phase.THOUGHT if thought.begun else Phase.START)]

    def advance(self, token: int) -> Advance:
        state = self._state_after(self._states[-1], token)
        if state is None:
            self.problem = "the thought had to be closed, or must not end the output"
            return Advance.REFUSED
        self._states = [state._replace(moved=False)]
        if not state.moved or self.rest is None:
            return Advance.OPEN
        advance, self.problem = self.rest.advance(token), self.rest.problem
        return advance

    def forced(self) -> list[int]:
        state = self._states[-1]
        if self._due(state):
            return [self._thought.closing]
        return self.rest.forced() if state.phase is Phase.REST and self.rest is not None else []

    def try_token(self, token: int) -> bool:
        state = self._state_after(self._states[-1], token)
        if state is None:
            return False
        if state.moved and self.rest is not None and not self.rest.try_token(token):
            return False
        self._states.append(state)
        return True

    def leave(self) -> None:
        if self._states.pop().moved and self.rest is not None:
            self.rest.leave()

    @property
    def complete(self) -> bool:
        in_rest = self._states[-1].phase is Phase.REST and self.rest is not None
        return in_rest and self.rest is not None and self.rest.complete

    def rows(self, masks: Tensor, row: int, tokens: Sequence[int]) -> ThoughtRows:
        """Fill in the masks of a thought; returns those that the grammar has to fill in.

        Args:
            masks: [rows, words] int32 in which everything is allowed.
            row: the row of the next token; those after each of `tokens` follow it.
        """
        left, state = ThoughtRows(), self._states[-1]
        for place in range(len(tokens) + 1):
            following = self._state_after(state, tokens[place]) if place < len(tokens) else None
            if state.phase is Phase.THOUGHT:
                self._fill(masks[row + place], state)
            elif self.rest is not None:
                if state.phase is not Phase.REST:
                    left.at_start.append(row + place)
                    left.also[row + place] = self._unmoved(state)
                if state.phase is Phase.REST or (following is not None and following.moved):
                    left.rest = row + place, [*tokens[place:]]
                    break
            if following is None:
                break
            state = following
        if left.at_start and left.rest is None:
            left.rest = left.at_start[-1], []
        return left

    def _state_after(self, state: _State, token: int) -> _State | None:
        """The state after a token, whether or not the grammar allows it; None if the thought does
        not."""
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
        """Tokens that are allowed outside of a thought and that the grammar does not see."""
        spaces, limited = [*self._thought.spaces], self.rest is not None
        if state.phase is Phase.START:
            # Without a thought after them, spaces would be content that the grammar forbids.
            return [*([] if limited else spaces), self._thought.opening]
        return spaces if state.phase is Phase.SPACE and state.length < _MOST_SPACES else []

    def _due(self, state: _State) -> bool:
        """Whether the closing mark must come next."""
        budget = self._thought.budget
        return state.phase is Phase.THOUGHT and budget is not None and state.length >= budget

    def _fill(self, mask: Tensor, state: _State) -> None:
        if self._due(state):
            mask.zero_()
            allow(mask, [self._thought.closing])
        elif self.rest is not None:
            forbid(mask, self._ends)


def allow(masks: Tensor, tokens: Collection[int]) -> None:
    """Allow tokens in masks: [..., words] int32."""
    for token in tokens:
        masks[..., token // WORD_BITS] |= _bit(token)


def forbid(masks: Tensor, tokens: Collection[int]) -> None:
    """Forbid tokens in masks: [..., words] int32."""
    for token in tokens:
        masks[..., token // WORD_BITS] &= ~_bit(token)


def _bit(token: int) -> Tensor:
    return torch.tensor(1 << token % WORD_BITS).to(torch.int32)
