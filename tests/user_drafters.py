"""Drafters as a user may write them, right and wrong."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import torch


class LastFollower:
    """Guesses what followed the last token when it came before, again and again."""

    def guess(self, requests: Sequence[Any]) -> list[list[int]]:
        return [self.chain(request.token_ids, request.most_tokens) for request in requests]

    def chain(self, tokens: Sequence[int], count: int) -> list[int]:
        following = dict(pairwise(tokens))
        guesses: list[int] = []
        token = tokens[-1]
        while len(guesses) < count and token in following:
            guesses.append(token := following[token])
        return guesses


class Scripted:
    """Answers each call by `answer(requests)`, and records the calls."""

    answer: Callable[[Sequence[Any]], Any] = staticmethod(lambda requests: [[] for _ in requests])
    seen: ClassVar[list[Any]] = []
    forgotten: ClassVar[list[str]] = []

    def guess(self, requests: Sequence[Any]) -> Any:
        type(self).seen.append(requests)
        return type(self).answer(requests)

    def forget(self, request_ids: Sequence[str]) -> None:
        type(self).forgotten.extend(request_ids)


class Fussy(LastFollower):
    """Fails for requests whose first token is 95."""

    def guess(self, requests: Sequence[Any]) -> list[list[int]]:
        if any(request.token_ids[0] == 95 for request in requests):
            raise ValueError("not this one")
        return super().guess(requests)


class WithoutGuess:
    pass


class Choosy:
    def __init__(self, flavour: str) -> None:
        if flavour != "sweet":
            raise ValueError(f"no {flavour}")

    def guess(self, requests: Sequence[Any]) -> Any:
        return [np.array([1, 2]) for _ in requests]


class Tensors:
    def guess(self, requests: Sequence[Any]) -> Any:
        return torch.tensor([[1, 2, 3]] * len(requests))


not_a_class = 3
