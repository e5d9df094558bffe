"""The P-EAGLE network by itself: rows apart and together, gradients, its own embedding."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream.cache.spec import CacheSizes, ModelCache
from slipstream.kernels.formats.dense import DenseMatrix
from slipstream.kernels.formats.weight import Weight
from slipstream.kernels.reference import REFERENCE
from slipstream.layers.parameters import Part
from slipstream.models.catalogue import read_decoder_config
from slipstream.models.checkpoint import Checkpoint
from slipstream.models.loading import LoadOptions
from slipstream.speculative.heads.checkpoint import HeadCheckpoint
from slipstream.speculative.heads.loading import HeadContext, load_network
from slipstream.speculative.p_eagle.network import PEagleHead, read_p_eagle_config
from tests.drafters.engines import PROMPT
from tests.drafters.heads import write_p_eagle
from tests.drafters.oracles import MASK, Target
from tests.drafters.oracles import p_eagle_oracle as oracle
from tests.pass_inputs import pass_inputs


def load(folder: Path, target: str) -> PEagleHead:
    checkpoint = HeadCheckpoint(folder)
    config = read_p_eagle_config(checkpoint)
    shape = read_decoder_config(Checkpoint(Path(target)))
    options = LoadOptions(torch.float32, torch.device("cpu"), "auto", max_positions=256)
    return load_network(PEagleHead, checkpoint, config, shape, options)


@dataclass
class Table:
    """The target's embedding, as far as it is looked at."""

    weight: DenseMatrix


class Request:
    """One request's blocks, and passes of a network over its rows."""

    def __init__(self, network: PEagleHead, folder: Path) -> None:
        layout = read_p_eagle_config(HeadCheckpoint(folder)).layout(torch.float32, torch.float32)
        sizes = CacheSizes(8, 8, 1, torch.device("cpu"))
        self.network, self.cache = network, ModelCache(layout, sizes)
        for pages in (pages for layer in self.cache.layers for pages in layer):
            pages.zero_()

    def rows(self, tokens: list[int], features: Tensor, start: int) -> Tensor:
        """The rows of tokens from position `start` on."""
        end = start + len(tokens)
        positions = torch.arange(start, end)
        inputs = pass_inputs(
            query_start=torch.tensor([0, len(tokens)]),
            context_lens=torch.tensor([end]),
            block_tables=torch.arange(8, dtype=torch.int32).unsqueeze(0),
            positions=positions,
            slots=positions,
            first_seen=1,
        )
        ids = torch.tensor(tokens, dtype=torch.int32)
        return self.network(ids, features, inputs, self.cache.layers)[0]


def test_one_pass_over_many_rows_equals_single_rows(tiny_target: str, tmp_path: Path) -> None:
    """Known tokens and masks alike; row by row, in two halves, and all at once."""
    folder = write_p_eagle(tmp_path, tiny_target, fit=False, draft_vocab=60)
    network, head = load(folder, tiny_target), oracle(folder, tiny_target)
    tokens, features = head.masked(PROMPT[:20], 5)
    whole = Request(network, folder).rows(tokens, features, 1)
    for size in (1, 7, 12):
        request = Request(network, folder)
        parts = [
            request.rows(tokens[start : start + size], features[start : start + size], 1 + start)
            for start in range(0, len(tokens), size)
        ]
        torch.testing.assert_close(torch.cat(parts), whole, atol=1e-5, rtol=0)
    torch.testing.assert_close(network.mask_feature(), features[-1:], atol=1e-5, rtol=0)


def test_an_embedding_of_its_own_is_never_the_targets(tiny_target: str, tmp_path: Path) -> None:
    """It is trained: its row of the mask token means something else than the target's."""
    folder = write_p_eagle(tmp_path, tiny_target, fit=False)
    own = load_file(folder / "model.safetensors")
    network, target = load(folder, tiny_target), Target(tiny_target)
    weights = {**own, "embed_tokens.weight": target.embedding.clone()}
    row = target.embedding[MASK] + 0.01
    weights["embed_tokens.weight"][MASK] = row
    save_file(weights, folder / "model.safetensors")
    network = load(folder, tiny_target)

    network.share(Table(DenseMatrix(target.embedding)), None)  # type: ignore[arg-type]
    assert torch.equal(network.embedded(torch.tensor([MASK]))[0], row)


class Learning:
    """A parameter source whose tensors can be differentiated by, under their published names."""

    def __init__(self, folder: Path) -> None:
        self._stored = load_file(folder / "model.safetensors")
        self.parts: dict[str, tuple[Tensor, slice]] = {}

    def matrix(self, parts: Sequence[Part], columns: int) -> DenseMatrix:
        return DenseMatrix(self._stacked(parts, (columns,)))

    table = embedding = head = matrix

    def vector(self, parts: Sequence[Part]) -> Tensor:
        return self._stacked(parts, ())

    def alike(self, parts: Sequence[Part]) -> bool:
        return True

    def tied(self, table: Weight) -> Weight:
        return table

    def _stacked(self, parts: Sequence[Part], tail: tuple[int, ...]) -> Tensor:
        tensors = [
            self._stored[part.name.removeprefix("model.")].view(part.rows, *tail) for part in parts
        ]
        stacked, start = torch.cat(tensors).requires_grad_(), 0
        for part in parts:
            self.parts[part.name] = (stacked, slice(start, start + part.rows))
            start += part.rows
        return stacked

    def gradient(self, name: str) -> Tensor:
        tensor, rows = self.parts[name]
        assert tensor.grad is not None, name
        return tensor.grad[rows]


@pytest.mark.parametrize("changes", [{"fc_norm": True}, {"norm_before_fc": True}, {}])
def test_the_network_learns(changes: dict[str, Any], tiny_target: str, tmp_path: Path) -> None:
    """Every tensor of the checkpoint gets the gradient that the oracle's has, by its own name:
    through known rows and masks, mask_hidden and the mask token's embedding."""
    folder = write_p_eagle(tmp_path, tiny_target, fit=False, **changes)
    config = read_p_eagle_config(HeadCheckpoint(folder))
    source, target = Learning(folder), Target(tiny_target)
    options = LoadOptions(torch.float32, torch.device("cpu"), "auto", max_positions=256)
    context = HeadContext(REFERENCE, source, target.embedding.shape[1], options)
    network = PEagleHead(context, config)
    network.share(Table(DenseMatrix(target.embedding)), None)  # type: ignore[arg-type]
    ids, count = PROMPT[:12], 4
    streams = target(ids[:-1])[0]
    picked = [streams[layer] for layer in config.entered_layers or ()]
    masks = network.mask_feature().expand(count - 1, -1)
    features = torch.cat((network.project(streams[0], picked), masks))
    tokens = [*ids[1:], *[MASK] * (count - 1)]
    logits = network.head(Request(network, folder).rows(tokens, features, 1))
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(8))
    (logits * weights).sum().backward()

    head = oracle(folder, tiny_target)
    leaves = {name: tensor.requires_grad_() for name, tensor in head.weights.items()}
    expected = head.rows(*head.masked(ids, count))[0]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    (expected * weights).sum().backward()
    assert leaves.keys() == {name.removeprefix("model.") for name in source.parts}
    for name in source.parts:
        theirs = leaves[name.removeprefix("model.")].grad
        assert theirs is not None
        ours = source.gradient(name).view(theirs.shape)
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)
        assert ours.abs().max() > 0
