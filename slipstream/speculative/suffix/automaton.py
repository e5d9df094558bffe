"""Which tokens followed which, in texts that grow.

A suffix automaton (Blumer et al. 1985) has one state for all strings that end at the same places of
its texts, and is built token by token. Here every state also counts these places, which makes it a
model of the text: what followed the last m tokens how often, for every m at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class GuessLimits:
    """How far a guess may go (the parameters of SuffixDecoding, Oliaro et al. 2024).

    Attributes:
        depth: most tokens of a match and its guess together.
        spec_factor: most guessed tokens per matched token.
        min_prob: a guess ends before it gets less probable than this.
        min_match: fewer tokens that match give no guess.
    """

    depth: int
    spec_factor: float
    min_prob: float
    min_match: int = 1

    def most_tokens(self) -> list[int]:
        """Most draft tokens behind a match of each length, from 0 to `depth`."""
        return [
            min(int(self.spec_factor * matched + 1e-6), self.depth - matched)
            if matched >= self.min_match
            else 0
            for matched in range(self.depth + 1)
        ]


@dataclass(frozen=True)
class Guess:
    """Tokens, and how many of them can be expected to be right: the sum of the probabilities that
    the texts give to the first one, the first two, and so on."""

    token_ids: list[int]
    score: float


NOTHING = Guess([], 0.0)


class SuffixAutomaton:
    """Counts exactly the strings of at most `limits.depth` tokens.

    A token costs amortised O(depth) dictionary steps, and at most two states. State 0 stands for
    the empty string; the strings of state s have length[link[s]] + 1 to length[s] tokens, and
    link[s] has the longest suffix of theirs that ends at more places.
    """

    def __init__(self, limits: GuessLimits) -> None:
        self._depth, self._min_prob = limits.depth, limits.min_prob
        self._most = limits.most_tokens()
        self._forget()

    def _forget(self) -> None:
        """Know no text."""
        self._next: list[dict[int, int]] = [{}]
        self._link, self._length = [-1], [0]
        self._count = [0]  # of the places where a state's strings end
        self._followed = [0]  # how many of these have a token behind them
        self._likely = [-1]  # the commonest of these tokens; of equally common ones the last
        self._whole = 0  # the state of the growing text
        self._recent = 0  # the state of its last `depth` tokens
        self.num_tokens = 0  # of all texts

    def add(self, text: Sequence[int]) -> None:
        """Add a complete text."""
        self._whole = self._recent = 0
        self.extend(text)

    def extend(self, tokens: Sequence[int]) -> None:
        """Continue the growing text. If this is interrupted, all texts are forgotten: half of a
        state could not be made whole again."""
        try:
            for token in tokens:
                self._extend(token)
            self.num_tokens += len(tokens)
        except BaseException:
            self._forget()
            raise

    def _extend(self, token: int) -> None:
        links, lengths = self._link, self._length
        self._whole = self._append(self._whole, token)
        before, state = self._recent, self._next[self._recent][token]
        while lengths[links[state]] >= self._depth:
            state = links[state]
        self._recent = state
        self._count_suffixes(state, before, token)

    def guess(self, context: Sequence[int], most: int, better_than: Guess = NOTHING) -> Guess:
        """At most `most` tokens behind `context`: of all its suffixes that came before, the guess
        with the best score, and of equal ones that of the longest."""
        best = better_than
        state, matched = self._match(context)
        while state > 0:
            parent = self._link[state]
            # All matches of one state were followed by the same tokens.
            longest = min(most, max(self._most[self._length[parent] + 1 : matched + 1]))
            if longest > best.score:
                guess = self._follow(state, longest)
                best = guess if guess.score > best.score else best
            state, matched = parent, self._length[parent]
        return best

    def _match(self, context: Sequence[int]) -> tuple[int, int]:
        """The longest suffix of at most `depth` tokens that is in a text: its state, its length."""
        state, matched = 0, 0
        for token in context[-self._depth :]:
            while state and token not in self._next[state]:
                state = self._link[state]
                matched = self._length[state]
            if token in self._next[state]:
                state, matched = self._next[state][token], matched + 1
        return state, matched

    def _follow(self, state: int, most: int) -> Guess:
        """The most frequent continuation, token by token."""
        tokens: list[int] = []
        probability, score = 1.0, 0.0
        while len(tokens) < most and self._followed[state]:
            token, followed = self._likely[state], self._followed[state]
            state = self._next[state][token]
            probability *= self._count[state] / followed
            if probability < self._min_prob:
                break
            tokens.append(token)
            score += probability
        return Guess(tokens, score)

    def _count_suffixes(self, state: int, before: int, token: int) -> None:
        """Count the strings of at most `depth` tokens that end with this token; and, where it
        stands behind those that end before it, what is likely there."""
        links, following, counts, likely = self._link, self._next, self._count, self._likely
        while state > 0:
            counts[state] += 1
            state = links[state]
        while before > 0:
            self._followed[before] += 1
            if likely[before] != token:
                after, rival = following[before], likely[before]
                if rival < 0 or counts[after[token]] >= counts[after[rival]]:
                    likely[before] = token
            before = links[before]

    def _append(self, whole: int, token: int) -> int:
        """The state of the growing text and this token."""
        if token in self._next[whole]:  # an earlier text began alike
            return self._exactly(whole, token)
        new = self._new_state(self._length[whole] + 1)
        state = whole
        while state >= 0 and token not in self._next[state]:
            self._next[state][token] = new
            state = self._link[state]
        if state >= 0:
            self._link[new] = self._exactly(state, token)
        return new

    def _exactly(self, state: int, token: int) -> int:
        """The state whose longest string is that of `state` and then `token`; it is split off from
        one with longer strings where that has to be."""
        found, length = self._next[state][token], self._length[state] + 1
        if self._length[found] == length:
            return found
        split = self._new_state(length)
        self._next[split] = dict(self._next[found])
        for known in (self._link, self._count, self._followed, self._likely):
            known[split] = known[found]
        self._link[found] = split
        while state >= 0 and self._next[state].get(token) == found:
            self._next[state][token] = split
            state = self._link[state]
        return split

    def _new_state(self, length: int) -> int:
        """A state that was never seen, below the empty string."""
        self._next.append({})
        self._length.append(length)
        self._link.append(0)
        self._count.append(0)
        self._followed.append(0)
        self._likely.append(-1)
        return len(self._next) - 1
