"""How many distinct experts neighbouring rows of texts choose."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from slipstream import LLM, SamplingParams
from slipstream.kernels.pass_inputs import PassInputs
from slipstream.kernels.reference.experts import route
from slipstream.layers.experts import Experts
from slipstream.layers.layer import SublayerInput
from slipstream.runner.captured_passes import CapturedPasses

_FIRST_TOKEN = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
_WINDOWS = 8  # places in each text


def distinct_experts(llm: LLM, texts: Sequence[Sequence[int]], rows: int) -> float | None:
    """Distinct experts of a layer, mean over layers and places, of `rows` neighbouring rows of each
    text together. What a row chooses depends on that row alone, so a pass that reads the texts
    chooses what decoding did.

    Returns:
        None where a backend fuses experts with their layers.
    """
    by_layer = [_choices(llm, text) for text in texts]
    if not all(by_layer):
        return None
    chosen = [torch.stack(layers) for layers in by_layer]
    shortest = min(len(text) for text in texts)
    counts = []
    for stop in torch.linspace(shortest // 2, shortest, _WINDOWS).int().tolist():
        start = max(0, stop - rows)
        together = torch.cat([one[:, start:stop].flatten(1) for one in chosen], dim=1)  # [L, n]
        counts += [len(layer.unique()) for layer in together]
    return sum(counts) / len(counts)


def _choices(llm: LLM, text: Sequence[int]) -> list[Tensor]:
    """For each target layer with experts, the chosen experts of a text's rows, [T, k].

    Layers of an MTP module have no row for the first token.
    """
    with _recorded() as found:
        llm.generate({"prompt_token_ids": list(text)}, _FIRST_TOKEN)
    layers = [torch.cat(parts) for parts in found.values()]
    return [layer for layer in layers if len(layer) == len(text)]


@contextmanager
def _recorded() -> Iterator[dict[int, list[Tensor]]]:
    """Keeps what rows choose, on the host, by layer; meanwhile passes over prompts are launched and
    not replayed, so that all are seen."""
    found: dict[int, list[Tensor]] = {}
    plain, replayed = Experts.apply, CapturedPasses.run

    def recording(self: Experts, ops: Any, entering: SublayerInput, inputs: PassInputs) -> Any:
        normed, _ = ops.norm(entering.addend, entering.residual, self.norm)
        found.setdefault(id(self), []).append(route(normed, self.parts.router)[0].cpu())  # type: ignore[attr-defined]
        return plain(self, ops, entering, inputs)

    Experts.apply = recording  # type: ignore[method-assign]
    CapturedPasses.run = lambda *_: None  # type: ignore[method-assign]
    try:
        yield found
    finally:
        Experts.apply = plain  # type: ignore[method-assign]
        CapturedPasses.run = replayed  # type: ignore[method-assign]
