"""Refuses, before a process is started, what ranks cannot do together."""

from slipstream.core.config import EngineConfig
from slipstream.core.errors import UsageError
from slipstream.models.checkpoint import Checkpoint
from slipstream.models.decoder_config import DecoderConfig
from slipstream.models.loading import RANDOM_FORMATS
from slipstream.models.sharing import require_equal_shares
from slipstream.speculative.loading import require_ranks


def require_sharing(config: EngineConfig, checkpoint: Checkpoint, shape: DecoderConfig) -> None:
    """Raise UsageError where the model cannot be on so many ranks."""
    random, apart = config.load_format in RANDOM_FORMATS, config.shares_experts
    if config.data_parallel_size > 1 and not apart:
        raise UsageError(
            f"data_parallel_size={config.data_parallel_size} is for slipstream serve, which starts "
            "as many whole replicas; one engine has enable_expert_parallel beside it, or "
            "tensor_parallel_size in its place"
        )
    if config.num_ranks > 1:
        require_equal_shares(checkpoint, shape, config.num_ranks, random, apart)
        require_ranks(config.drafter_options, 1 if apart else config.num_ranks, random)
