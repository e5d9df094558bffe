"""Putting an engine together."""

from slipstream.cache.block_manager import BlockManager
from slipstream.cache.kv_cache import KVCache, KVLayout
from slipstream.core.config import EngineConfig
from slipstream.engine.engine import Engine
from slipstream.engine.logprobs import LogprobReader
from slipstream.engine.resolve import (
    Resolved,
    resolve,
    resolve_device,
    resolve_dtype,
    resolve_model_len,
)
from slipstream.engine.scheduler import Scheduler
from slipstream.engine.step import Step
from slipstream.models.catalogue import read_decoder_config
from slipstream.models.checkpoint import Checkpoint, resolve_checkpoint
from slipstream.models.decoder import Decoder
from slipstream.models.loading import LoadOptions, ProgressBar, load_decoder, no_progress_bar
from slipstream.models.tokenizer import Tokenizer
from slipstream.runner.device_state import DeviceState
from slipstream.runner.model_runner import ModelRunner
from slipstream.sampling.state import SamplingState
from slipstream.speculative.catalogue import load_drafter
from slipstream.speculative.drafter import DrafterResources, LoadedDrafter
from slipstream.speculative.options import TargetModel


def build_engine(config: EngineConfig, progress_bar: ProgressBar = no_progress_bar) -> Engine:
    """Load the models and size the cache.

    Raises:
        UsageError: options that contradict each other or ask for what is not there.
        CheckpointError: a checkpoint that is broken, unsupported or does not fit.
    """
    checkpoint = Checkpoint(resolve_checkpoint(config.model, config.revision))
    shape = read_decoder_config(checkpoint)
    device = resolve_device(config)
    dtype = resolve_dtype(config, shape.dtype)
    options = LoadOptions(
        dtype=dtype,
        device=device,
        load_format=config.load_format,
        max_positions=resolve_model_len(config, shape),
        seed=config.seed,
        progress_bar=progress_bar,
    )
    target = TargetModel(checkpoint.path, shape.vocab_size, options)
    speculation = load_drafter(config.speculative_config, target)
    network = load_decoder(checkpoint, options)
    resolved = resolve(config, shape, checkpoint.eos_token_ids, dtype, device, speculation)
    return assemble(resolved, config, network, speculation.drafter, _tokenizer(config, checkpoint))


def assemble(
    resolved: Resolved,
    config: EngineConfig,
    network: Decoder,
    drafter: LoadedDrafter,
    tokenizer: Tokenizer | None,
) -> Engine:
    """The engine around loaded models."""
    limits, device, shape = resolved.limits, resolved.device, network.config
    state = DeviceState(limits.max_num_seqs, limits.max_model_len, config.block_size, device)
    sampling = SamplingState(limits.max_num_seqs, shape.vocab_size, device)
    layout = KVLayout(shape.num_layers, shape.num_kv_heads, shape.head_dim, resolved.dtype)
    cache = KVCache(layout, resolved.num_blocks, config.block_size, device)
    runner = ModelRunner(network, cache, state)
    resources = DrafterResources(state, sampling, resolved.num_blocks, config.use_fp64_gumbel)
    blocks = BlockManager(resolved.num_blocks, config.block_size, config.enable_prefix_caching)
    scheduler = Scheduler(limits, blocks)
    step = Step(scheduler, runner, drafter.build(resources), state, sampling, resolved.verification)
    return Engine(resolved, scheduler, step, LogprobReader(runner, tokenizer), tokenizer)


def _tokenizer(config: EngineConfig, checkpoint: Checkpoint) -> Tokenizer | None:
    if config.skip_tokenizer_init:
        return None
    return Tokenizer(resolve_checkpoint(config.tokenizer) if config.tokenizer else checkpoint.path)
