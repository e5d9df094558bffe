"""Loads the models of an engine."""

from dataclasses import replace
from functools import partial

import torch

from slipstream.core.config import STORED_QUANTIZATIONS, EngineConfig
from slipstream.core.errors import UsageError
from slipstream.core.sampling_params import SamplingDefaults
from slipstream.engine.assembly import assemble
from slipstream.engine.engine import Engine
from slipstream.engine.image_loading import choose_family, image_reader, least_rows, require_images
from slipstream.engine.named_target import with_named_target
from slipstream.engine.prompts import eos_token_ids, read_tokenizer, require_rows
from slipstream.engine.ranks.leader import start_ranks
from slipstream.engine.ranks.ranks import Ranks, breaking_off
from slipstream.engine.resolve import (
    max_batched_tokens,
    require_precision,
    require_stored_precision,
    resolve,
    resolve_dtype,
    resolve_model_len,
)
from slipstream.engine.sizing import Reasons, WeightRoom
from slipstream.layers.adapters import AdapterSlots
from slipstream.layers.parameters import WHOLE
from slipstream.models.checkpoint import Checkpoint, Replaced, resolve_checkpoint
from slipstream.models.decoder_config import DecoderConfig
from slipstream.models.generation_config import generation_folder, read_sampling_defaults
from slipstream.models.hub import HubAccess, hub_settings
from slipstream.models.loading import (
    RANDOM_FORMATS,
    LoadOptions,
    ProgressBar,
    decoder_bytes,
    load_decoder,
    no_progress_bar,
)
from slipstream.models.precision import names_stored_form
from slipstream.models.quantized.catalogue import read_quantization, require_format
from slipstream.models.sharing import require_equal_shares
from slipstream.models.tensor_check import require_tensors
from slipstream.models.tokenizer import Tokenizer
from slipstream.models.vision.tower import ImageFamily
from slipstream.runner.capability import (
    choose_device,
    kept_formats,
    require_stored,
    stored_note,
)
from slipstream.runner.collectives import CollectiveError
from slipstream.runner.memory import gigabytes
from slipstream.runner.threads import set_threads
from slipstream.speculative.drafter import NO_STATES, LoadedDrafter
from slipstream.speculative.loading import load_drafter, require_ranks
from slipstream.speculative.options import TargetModel, read_target_config


def build_engine(
    config: EngineConfig, progress_bar: ProgressBar = no_progress_bar, ranks: Ranks | None = None
) -> Engine:
    """Load the models and size the cache.

    Args:
        ranks: the ranks to which this process belongs; None: this process leads, and starts the
            other ranks that the options ask for.

    Raises:
        UsageError: options that contradict each other or ask for what is not there.
        CheckpointError: a checkpoint that is broken, unsupported or does not fit.
        RanksLostError: another process could not load its share.
    """
    with hub_settings(HubAccess(config.download_dir, config.hf_token)):
        return _build_engine(config, progress_bar, ranks)


def _build_engine(config: EngineConfig, progress_bar: ProgressBar, ranks: Ranks | None) -> Engine:
    reasons = Reasons()
    config = with_named_target(config, reasons)
    checkpoint = Checkpoint(resolve_checkpoint(config.model, config.revision), _replaced(config))
    defaults = read_sampling_defaults(
        checkpoint, config.generation_config, config.override_generation_config
    )
    if defaults.values:
        reasons.add("defaults of requests", defaults, defaults.source)
    shape = read_target_config(checkpoint)
    require_images(config, checkpoint)
    tokenizer = read_tokenizer(config, checkpoint)
    if tokenizer is not None:
        require_rows(tokenizer, shape)
    device, why = choose_device(config.device)
    reasons.add("device", device, why)
    if ranks is None:  # before processes are started, and drafters are read
        if config.load_format not in RANDOM_FORMATS:
            require_tensors(checkpoint, shape)
        require_sharing(config, checkpoint, shape)
    ranks = ranks or start_ranks(config, device)
    try:
        return _load(
            config, checkpoint, shape, tokenizer, device, defaults, ranks, reasons, progress_bar
        )
    except CollectiveError as error:
        lost = ranks.lost(error)
        ranks.close()
        raise lost from error
    except BaseException:
        ranks.close()
        raise


def _load(
    config: EngineConfig,
    checkpoint: Checkpoint,
    shape: DecoderConfig,
    tokenizer: Tokenizer | None,
    device: torch.device,
    defaults: SamplingDefaults,
    ranks: Ranks,
    reasons: Reasons,
    progress_bar: ProgressBar,
) -> Engine:
    """This rank's share of the models, and the engine around it."""
    eos = eos_token_ids(checkpoint, tokenizer, shape.vocab_size)
    config = _as_stored(config, checkpoint, device, reasons)
    require_precision(config, device)
    require_slots(config)
    dtype = resolve_dtype(config, shape.dtype, device, reasons)
    room = WeightRoom(device, reasons)
    share, experts = ranks.share, WHOLE
    if config.shares_experts:
        share, experts = replace(WHOLE, least=share.least), share
    options = LoadOptions(
        dtype=dtype,
        device=device,
        load_format=config.load_format,
        max_positions=resolve_model_len(config, shape),
        seed=config.seed,
        quantization=config.quantization,
        kept=kept_formats(device),
        stored_check=partial(require_stored, device),
        batch_invariant=config.batch_invariant,
        twin_of=shape,
        share=share,
        experts=experts,
        adapters=(config.max_loras, config.max_lora_rank) if config.enable_lora else None,
        progress_bar=breaking_off(progress_bar, ranks),
        memory_check=room.check,
    )
    size = decoder_bytes(checkpoint, shape, options)
    reasons.add("threads", *set_threads(device, dtype, config.threads, size, ranks.share.size))
    drafter_options = replace(options, experts=WHOLE, memory_check=room.with_pending(size))
    target = TargetModel(
        checkpoint.path, shape.vocab_size, drafter_options, config.max_num_seqs, checkpoint.replaced
    )
    speculation = load_drafter(config.drafter_options, target)
    family = choose_family(config, checkpoint, options.max_positions, reasons)
    if family is not None:
        config, shape, options = _adapt_to_images(config, shape, options, family)
    network = load_decoder(checkpoint, options, shape, checked=True)  # by the leader
    if config.enable_lora:
        report_adapters(network.adapters, speculation.drafter.adapters, reasons)
    # Only the leader encodes images; the other ranks get the embeddings with the requests.
    tower = family.load(dtype, device) if family is not None and ranks.leads else None
    resolved = resolve(config, shape, eos, dtype, device, speculation, reasons, share, ranks.share)
    resolved = replace(resolved, sampling_defaults=defaults)
    drafter = speculation.drafter
    _require_attention(drafter)
    images = image_reader(config, resolved, family, tower, tokenizer)
    return assemble(resolved, config, network, drafter, tokenizer, progress_bar, ranks, images)


def _as_stored(
    config: EngineConfig, checkpoint: Checkpoint, device: torch.device, reasons: Reasons
) -> EngineConfig:
    """Drop a `quantization` that only names the checkpoint's own format, after checking it."""
    stored = read_quantization(checkpoint.config, checkpoint.config_file)
    named = config.quantization
    if named in STORED_QUANTIZATIONS:
        require_format(checkpoint, named)
        config = replace(config, quantization=None)
    elif named is not None and stored is not None and names_stored_form(named, stored):
        config = replace(config, quantization=None)
    if stored is not None:
        require_stored_precision(config, device, checkpoint.path.name, stored)
        reasons.add("checkpoint quantization", stored.description, stored_note(device))
    return config


def _adapt_to_images(
    config: EngineConfig, shape: DecoderConfig, options: LoadOptions, family: ImageFamily
) -> tuple[EngineConfig, DecoderConfig, LoadOptions]:
    """Adapt options and sizes to a model whose prompts may contain images."""
    device = options.device
    token = family.placeholder.token
    shape = replace(shape, num_added_layers=family.num_added_layers, image_token=token)
    if config.max_num_batched_tokens is None and (least := least_rows(config, family)):
        rows = max(max_batched_tokens(config, device)[0], least)
        config = replace(config, max_num_batched_tokens=rows)
    if family.several_axes:
        # Rows of a pass, and one token of each request that is computed again.
        rows = max_batched_tokens(config, device)[0] + config.max_num_seqs
        options = replace(options, num_composed=rows)
    return config, shape, options


def _replaced(config: EngineConfig) -> Replaced:
    """The files and values that options put in place of those in the model's directory."""
    elsewhere = config.hf_config_path
    return Replaced(
        config=config.hf_overrides or {},
        config_folder=None if elsewhere is None else resolve_checkpoint(elsewhere),
        generation_folder=generation_folder(config.generation_config),
    )


def _require_attention(drafter: LoadedDrafter) -> None:
    """Raise UsageError for a drafter with recurrent state, which cannot resume from KV blocks."""
    if not all(kept.blocks_resume for kept in drafter.layouts):
        raise UsageError(NO_STATES)


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


def require_sharing(config: EngineConfig, checkpoint: Checkpoint, shape: DecoderConfig) -> None:
    """Raise UsageError if the model does not support this number of ranks."""
    random, apart = config.load_format in RANDOM_FORMATS, config.shares_experts
    if config.data_parallel_size > 1 and not apart:
        raise UsageError(
            f"data_parallel_size={config.data_parallel_size} is for slipstream serve, which starts "
            "as many whole replicas; one engine has enable_expert_parallel in addition, or "
            "tensor_parallel_size in its place"
        )
    if config.num_ranks > 1:
        require_equal_shares(checkpoint, shape, config.num_ranks, random, apart)
        require_ranks(config.drafter_options, 1 if apart else config.num_ranks, random)
