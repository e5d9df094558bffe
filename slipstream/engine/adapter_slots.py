"""The slots of an engine's adapters, in the layers of its target and of its drafter."""

from slipstream.core.config import EngineConfig
from slipstream.core.errors import UsageError
from slipstream.engine.adapters import Adapters
from slipstream.engine.ranks.ranks import Ranks
from slipstream.engine.sizing import Reasons
from slipstream.layers.adapters import AdapterSlots
from slipstream.runner.adapters import AdapterLoader
from slipstream.runner.memory import gigabytes


def make_adapters(
    target: AdapterSlots | None, drafter: AdapterSlots | None, ranks: Ranks
) -> Adapters:
    """The `Adapters` of an engine whose networks have these slots; None: they take no adapters."""
    if target is None:
        return Adapters()
    loader = AdapterLoader(target, drafter)
    return Adapters(target.count, loader.read, loader.write, loader.fill, ranks.tell)


def require_slots(config: EngineConfig) -> None:
    """Raise UsageError for adapter options that have no effect."""
    usual = EngineConfig.max_loras, EngineConfig.max_lora_rank
    if not config.enable_lora and (config.max_loras, config.max_lora_rank) != usual:
        raise UsageError("max_loras and max_lora_rank need enable_lora; give it, or leave them out")


def report_adapters(
    target: AdapterSlots | None, drafter: AdapterSlots | None, reasons: Reasons
) -> None:
    """Note the memory of the slots; UsageError if the target has no layer that takes adapters."""
    if target is None:
        raise UsageError(
            "enable_lora: no layer of this model takes adapters, which are for projections of "
            "attention and of feed-forward layers without experts; leave it out"
        )
    size = f"{target.count} of rank {target.rank}"
    nbytes = target.nbytes + (0 if drafter is None else drafter.nbytes)
    reasons.add("slots of adapters", size, f"max_loras, max_lora_rank: {gigabytes(nbytes)}")
