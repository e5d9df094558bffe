"""Runs steps of the kinds that traffic consists of, before a server is ready.

On a GPU kernels are compiled when they are first launched, and some depend on the number of rows
or requests, or on what requests ask of sampling: a first step of a new kind may take seconds.
Graphs of decode steps are captured when the engine is built, and compile what those steps need.
These steps are prompts, alone and beside requests that decode.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from slipstream.core.sampling_params import SamplingParams
from slipstream.engine.artificial_requests import GREEDY, ArtificialRequests
from slipstream.engine.launcher import Launcher
from slipstream.engine.resolve import Resolved
from slipstream.models.loading import ProgressBar, no_progress_bar
from slipstream.runner.captured_passes import ROWS, WANTED_BEFORE_CAPTURE

_ASKED = (  # each is computed by kernels of its own
    SamplingParams(temperature=1, ignore_eos=True),
    SamplingParams(temperature=0.8, top_k=20, top_p=0.9, presence_penalty=0.1, ignore_eos=True),
    SamplingParams(temperature=0.8, top_p=0.9, seed=0, ignore_eos=True),
)
# Matmuls have other tiles for other numbers of rows; see `kernels/triton/matmul_tiles.py`. Below
# these numbers a pass has as many rows as captured steps have. Passes of the sizes `ROWS` are
# repeated until they are captured.
_ROWS = (
    *(20, 28, 36, 44, 60, 70, 78, 90, 120, 133, 140, 155, 180),
    *(230, 262, 270, 280, 300, 400, 500, 600),
)
_REQUESTS = (1, 2, 4, 8, 16, 32, 128)  # attention has other tiles for other numbers of requests
_SHORT = 20  # rows of a prompt: more than drafts have
_FEW = 2  # requests for which all numbers of draft tokens are tried


@dataclass(frozen=True)
class _Kind:
    """Steps of `requests` prompts of `length` tokens.

    Attributes:
        decodes: the requests decode afterwards.
        joined: another prompt is computed beside them then.
        adapted: the steps are those of requests with adapters.
    """

    requests: int
    length: int
    params: SamplingParams = GREEDY
    decodes: bool = False
    joined: bool = False
    adapted: bool = False


def warm_up(
    step: Launcher,
    resolved: Resolved,
    widths: Sequence[int],
    block_size: int,
    progress_bar: ProgressBar = no_progress_bar,
    adapted: bool = False,
) -> None:
    """Run steps of all kinds. No request may be running; all slots and blocks are free afterwards.

    Args:
        widths: numbers of draft tokens that steps can have, rising from 0.
        adapted: requests may have adapters.
    """
    growth = 1 + 2 * sum(width + 1 for width in widths)
    requests = ArtificialRequests(step, resolved, block_size, growth)
    kinds = list(_kinds(resolved, requests.longest - growth, widths[-1], adapted))
    try:
        with progress_bar("running first steps", len(kinds), "kinds") as progress:
            for kind in kinds:
                _run(kind, step, requests, widths)
                progress(1)
    finally:
        requests.clear()


def _kinds(resolved: Resolved, longest: int, most_drafts: int, adapted: bool) -> Iterator[_Kind]:
    """Kinds that the engine can run, the longest passes first: if memory is short, they fail."""
    limits = resolved.limits
    rows, slots = limits.max_num_batched_tokens, limits.max_num_seqs
    lengths = sorted({min(longest, rows, it) for it in (*_ROWS, *ROWS, rows)}, reverse=True)
    short = min(_SHORT, lengths[0])
    if short < 1:  # max_model_len is too small for these requests
        return
    for length in lengths:
        kinds = [_Kind(1, length), *[_Kind(1, length, adapted=True)] * adapted]
        yield from kinds * (WANTED_BEFORE_CAPTURE if length in ROWS else 1)
    most = min(slots - 1, rows // short, (rows - short) // (most_drafts + 1))
    if most < 1:
        if most_drafts < rows:
            yield from (_Kind(1, short, params, decodes=True) for params in _ASKED)
        return
    for count in sorted({min(most, count) for count in _REQUESTS}):
        yield _Kind(count, short, decodes=True, joined=True)
    for params in _ASKED:
        yield _Kind(min(2, most), short, params, decodes=True, joined=True)


def _run(kind: _Kind, step: Launcher, requests: ArtificialRequests, widths: Sequence[int]) -> None:
    slots, other = range(kind.requests), kind.requests
    requests.admit(slots, kind.length, kind.params, kind.adapted)
    requests.finish(step.launch(requests.with_prompts(requests.batch(()), slots)))
    if kind.requests > _FEW:
        widths = 0, widths[-1]
    for width in widths if kind.decodes else ():
        live = [*slots, other] if kind.joined else slots
        if kind.joined:
            requests.admit([other], kind.length, kind.params)
            batch = requests.with_prompts(requests.batch(slots, width), [other])
            requests.finish(step.launch(batch))
        requests.finish(step.launch(requests.batch(live, width)))
