"""The dense context of training: each network owns what its passes keep."""

import itertools

import torch

from slipstream.models.catalogue import read_decoder_config
from slipstream.models.decoder import Decoder
from slipstream.models.decoder_config import DecoderConfig
from slipstream.train.dense import DENSE, DenseContext
from slipstream.train.parameters import RandomSource, Trainable
from tests.checkpoints import QWEN3

BATCH, LENGTH = 2, 7


def decoder(seed: int) -> tuple[Decoder, DecoderConfig]:
    config = read_decoder_config(QWEN3)
    source = Trainable(RandomSource(torch.device("cpu"), seed))
    return Decoder(DENSE, source, config, 32), config


def run(network: Decoder, context: DenseContext, seed: int) -> torch.Tensor:
    ids = torch.randint(1, 96, (BATCH * LENGTH,), generator=torch.Generator().manual_seed(seed))
    rows = context.rows(torch.arange(LENGTH))
    return network(ids, rows, context.caches)[0]


@torch.no_grad()
def test_chains_of_two_contexts_do_not_mix() -> None:
    (network, config), (other, _) = decoder(0), decoder(1)

    def new(is_chain: bool) -> DenseContext:
        return DenseContext(BATCH, config.num_layers, is_chain)

    alone = new(True)
    expected = [run(network, alone, seed) for seed in (1, 2, 3)]
    first, second, third = new(True), new(True), new(True)
    found = []
    for seed in (1, 2, 3):
        found.append(run(network, first, seed))
        run(network, second, seed + 10)
        run(other, third, seed)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)
    assert not torch.equal(expected[2], run(network, new(False), 3))


@torch.no_grad()
def test_a_pass_is_given_positions_and_no_pages() -> None:
    network, config = decoder(0)
    context = DenseContext(BATCH, config.num_layers)
    rows = context.rows(torch.arange(3, 6))
    assert rows.rows.positions.tolist() == [3, 4, 5] * BATCH
    assert rows.rows.query_start.tolist() == [0, 3, 6]
    assert not hasattr(rows, "paging")
    run(network, context, 1)
    for layer, following in itertools.pairwise(context.caches):
        assert layer is not following
        assert layer.passes == []
