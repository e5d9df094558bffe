"""Checks, without loading weights, whether tensor parallel ranks can share a model."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from slipstream.core.errors import UsageError
from slipstream.kernels.formats.weight import Weight
from slipstream.layers.expert_pool import ExpertPool, Unsplit
from slipstream.layers.experts import ExpertsSpec
from slipstream.layers.layer import BuildContext, FeedForwardSpec, build_layers
from slipstream.layers.parallel_experts import ParallelExpertsSpec
from slipstream.layers.parameters import (
    COLUMNS,
    MOST_RANKS,
    ROWS,
    WHOLE,
    Part,
    Share,
    UnequalSharesError,
)
from slipstream.layers.rope import RopeTables
from slipstream.models.checkpoint import Checkpoint
from slipstream.models.decoder_config import DecoderConfig
from slipstream.models.precision import NOWHERE, Shapes
from slipstream.models.quantized.catalogue import read_quantization
from slipstream.models.quantized.source import stored_unit

Unit = Callable[[Part, int], int]  # (part, columns of its matrix) -> see `stored_unit`


class _Shares(Shapes):
    """A source without data, which raises UnequalSharesError if a matrix cannot be split equally.

    Attributes:
        unit: the largest unit of the feed-forward matrices that are split by columns.
    """

    def __init__(self, share: Share, unit: Unit) -> None:
        super().__init__()
        self._share, self._unit_of, self.unit = share, unit, 1

    def matrix(self, parts: Sequence[Part], columns: int) -> Weight:
        for part in parts:
            if part.split == ROWS:
                self._share.span_of(part, part.rows)
            elif part.split == COLUMNS:
                self._columns(part, columns)
        return super().matrix(parts, columns)

    def _columns(self, part: Part, columns: int) -> None:
        unit = self._unit_of(part, columns)
        if part.unit is not None:
            self.unit = max(self.unit, unit)
        if part.unit is not None or unit == 1:
            self._share.span_of(part, columns)
        else:
            self._share.span(columns // unit, f"groups of {unit} columns of {part.name}")


def require_equal_shares(
    checkpoint: Checkpoint,
    config: DecoderConfig,
    num_ranks: int,
    random: bool,
    experts_alone: bool = False,
) -> None:
    """Raise UsageError, naming the numbers of ranks that fit, if `num_ranks` cannot share a model.

    Args:
        random: weights are random, so the checkpoint's tensors are not read.
        experts_alone: ranks share only experts, and hold all else whole.
    """
    if experts_alone and without_experts(config) == config:
        raise UsageError(
            f"{checkpoint.path.name} has no experts that {num_ranks} processes could share; leave "
            "out enable_expert_parallel: slipstream serve --data-parallel-size starts whole "
            "replicas, and the processes of tensor_parallel_size share a dense model"
        )
    unit = _unit_of(checkpoint, random)
    share = replace(WHOLE, unit=shared_unit(checkpoint, config, random))
    problem = _problem(config, replace(share, size=num_ranks), unit, experts_alone)
    if problem is None:
        return
    sizes = range(1, MOST_RANKS + 1)
    found = {it: _problem(config, replace(share, size=it), unit, experts_alone) for it in sizes}
    fitting = [it for it, problem in found.items() if problem is None]
    raise UsageError(
        f"{checkpoint.path.name}: {problem}; use a number of ranks that can share all of the model "
        f"({', '.join(map(str, fitting))})"
    )


def shared_unit(checkpoint: Checkpoint, config: DecoderConfig, random: bool) -> int:
    """`Share.unit` of a model; `random` as in `require_equal_shares`."""
    source = _Shares(WHOLE, _unit_of(checkpoint, random))
    _build(config, WHOLE, source)
    return source.unit


def without_experts(config: DecoderConfig) -> DecoderConfig:
    """The config without its mixtures of experts; some layers may have no feed-forward part."""
    halves = [(it, _dense(it.feed_forward)) for it in config.layers]
    kept = [replace(it, feed_forward=dense) for it, dense in halves if it.mixer or dense]
    return replace(config, layers=tuple(kept))


def _dense(spec: FeedForwardSpec | None) -> FeedForwardSpec | None:
    if isinstance(spec, ParallelExpertsSpec):
        return spec.dense
    return None if isinstance(spec, ExpertsSpec) else spec


def _problem(config: DecoderConfig, share: Share, unit: Unit, experts_alone: bool) -> str | None:
    try:
        _build(config, share, _Shares(share, unit), experts_alone)
    except UnequalSharesError as error:
        return error.problem
    return None


def _build(
    config: DecoderConfig, share: Share, source: _Shares, experts_alone: bool = False
) -> None:
    ropes = RopeTables(1, NOWHERE)
    context = BuildContext(source, config.hidden_size, ropes, share)
    if experts_alone:
        pool = ExpertPool(share, source)
        context = BuildContext(Unsplit(source), config.hidden_size, ropes, pool=pool)
    build_layers(config.layers, context)


def _unit_of(checkpoint: Checkpoint, random: bool) -> Unit:
    stored = read_quantization(checkpoint.config, checkpoint.config_file)
    entries = {} if random else checkpoint.entries

    def unit(part: Part, columns: int) -> int:
        return 1 if stored is None else stored_unit(entries, stored, part, columns)

    return unit
