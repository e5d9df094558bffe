"""Drafters as a user may write them, right and wrong."""

from itertools import pairwise
from typing import ClassVar

import numpy as np
import torch


class LastFollower:
    """Guesses what followed the last token when it came before, again and again."""

    def guess(self, requests):
        return [self.chain(request.token_ids, request.most_tokens) for request in requests]

    def chain(self, tokens, count):
        following = dict(pairwise(tokens))
        guesses, token = [], tokens[-1]
        while len(guesses) < count and token in following:
            guesses.append(token := following[token])
        return guesses


class Scripted:
    """Answers each call with what `answer` makes of the requests; remembers what it was told."""

    answer = staticmethod(lambda requests: [[] for _ in requests])
    seen: ClassVar[list] = []
    forgotten: ClassVar[list] = []

    def guess(self, requests):
        type(self).seen.append(requests)
        return type(self).answer(requests)

    def forget(self, request_ids):
        type(self).forgotten.extend(request_ids)


class WithoutGuess:
    pass


class Choosy:
    def __init__(self, flavour):
        if flavour != "sweet":
            raise ValueError(f"no {flavour}")

    def guess(self, requests):
        return [np.array([1, 2]) for _ in requests]


class Tensors:
    def guess(self, requests):
        return torch.tensor([[1, 2, 3]] * len(requests))


not_a_class = 3
