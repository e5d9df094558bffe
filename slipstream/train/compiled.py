"""Functions over whole vocabularies, as one kernel where a GPU computes them."""

import logging
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

Given = ParamSpec("Given")
Result = TypeVar("Result")

_log = logging.getLogger(__name__)


def fused(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """Compile a function that needs no gradient, if its first argument is on a GPU.

    Rows of logits are so long that separate ops spend their time on reading and writing them. On a
    CPU the function runs uncompiled, and also where it cannot be compiled, with a warning.
    """
    chosen: list[Callable[Given, Result]] = []

    @wraps(function)
    def run(*given: Given.args, **named: Given.kwargs) -> Result:
        first = given[0]
        if not (isinstance(first, torch.Tensor) and first.is_cuda):
            return function(*given, **named)
        if not chosen:
            chosen.append(torch.compile(function))
        try:
            return chosen[0](*given, **named)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # the compiler and its parts raise many kinds
            if chosen[0] is function:
                raise
            _log.warning("%s runs without compilation: %s", function.__name__, error)
            chosen[0] = function
            return function(*given, **named)

    return run
