"""Loads the models of an engine and puts it together."""

from dataclasses import replace
from functools import partial
from importlib import import_module

import torch

from slipstream.cache.spec import CacheSizes, ModelCache
from slipstream.core.config import STORED_QUANTIZATIONS, EngineConfig
from slipstream.core.errors import CheckpointError, UsageError
from slipstream.core.sampling_params import SamplingDefaults
from slipstream.core.step_form import CapturedForm, StepForm
from slipstream.engine.adapter_slots import make_adapters, report_adapters, require_slots
from slipstream.engine.drafting.calibration import calibrate
from slipstream.engine.drafting.kept_costs import CostFile, KeptCosts
from slipstream.engine.engine import Engine
from slipstream.engine.grammar import Grammars
from slipstream.engine.guidance import Guidance
from slipstream.engine.image_loading import choose_family, image_reader, least_rows, require_images
from slipstream.engine.images import ImageReader, NoImages
from slipstream.engine.logprobs import LogprobReader
from slipstream.engine.media import MediaReader
from slipstream.engine.named_target import with_named_target
from slipstream.engine.prompts import eos_token_ids, read_tokenizer, require_rows
from slipstream.engine.ranks.division import divide
from slipstream.engine.ranks.leader import start_ranks
from slipstream.engine.ranks.ranks import ALONE, Ranks, breaking_off
from slipstream.engine.ranks.requirements import require_sharing
from slipstream.engine.resolve import (
    Resolved,
    max_batched_tokens,
    require_precision,
    require_stored_precision,
    resolve,
    resolve_dtype,
    resolve_model_len,
)
from slipstream.engine.scheduler import Scheduler
from slipstream.engine.sizing import Reasons, WeightRoom
from slipstream.engine.step import Step
from slipstream.engine.step_graphs import (
    capture_plain,
    captured_counts,
    draft_policy,
    graph_runner,
    step_form,
)
from slipstream.engine.target_cache import block_manager, shares_prefixes, target_sizes
from slipstream.kernels.registry import kernels_for
from slipstream.layers.parameters import WHOLE
from slipstream.models.catalogue import read_decoder_config
from slipstream.models.checkpoint import Checkpoint, Replaced, resolve_checkpoint
from slipstream.models.decoder import Decoder
from slipstream.models.decoder_config import DecoderConfig
from slipstream.models.generation_config import generation_folder, read_sampling_defaults
from slipstream.models.hub import HubAccess, hub_settings
from slipstream.models.loading import (
    LoadOptions,
    ProgressBar,
    decoder_bytes,
    load_decoder,
    no_progress_bar,
)
from slipstream.models.quantized.catalogue import read_quantization, require_format
from slipstream.models.tokenizer import Tokenizer
from slipstream.models.vision.tower import ImageFamily
from slipstream.runner.capability import (
    choose_device,
    device_name,
    kept_formats,
    require_stored,
    stored_note,
)
from slipstream.runner.collectives import CollectiveError
from slipstream.runner.device_state import DeviceState
from slipstream.runner.model_runner import ModelRunner
from slipstream.runner.threads import set_threads
from slipstream.sampling.state import SamplingState
from slipstream.speculative.catalogue import kind_of_drafter
from slipstream.speculative.drafter import NO_STATES, DrafterResources, LoadedDrafter
from slipstream.speculative.loading import load_drafter
from slipstream.speculative.options import TargetModel


def _read_shape(checkpoint: Checkpoint) -> DecoderConfig:
    """The target's configuration; a drafter that is given in its place is refused as one."""
    try:
        return read_decoder_config(checkpoint)
    except CheckpointError as error:
        kind = kind_of_drafter(checkpoint.config)
        if kind is None:
            raise
        raise CheckpointError(
            f"{checkpoint.path} is a drafter of the kind {kind}, which goes with a target: give "
            "the target as model, and this as the drafter (--drafter)"
        ) from error


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
    shape = _read_shape(checkpoint)
    require_images(config, checkpoint)
    tokenizer = read_tokenizer(config, checkpoint)
    if tokenizer is not None:
        require_rows(tokenizer, shape)
    device, why = choose_device(config.device)
    reasons.add("device", device, why)
    if ranks is None:  # before processes are started
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
    dtype = resolve_dtype(config, shape.dtype)
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
    beside = replace(options, experts=WHOLE, memory_check=room.beside(size))
    target = TargetModel(
        checkpoint.path, shape.vocab_size, beside, config.max_num_seqs, checkpoint.replaced
    )
    speculation = load_drafter(config.drafter_options, target)
    family = choose_family(config, checkpoint, reasons)
    if family is not None:
        config, shape, options = _adapt_to_images(config, shape, options, family)
    network = load_decoder(checkpoint, options, shape)
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
    if config.quantization in STORED_QUANTIZATIONS:
        require_format(checkpoint, config.quantization)
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


def assemble(
    resolved: Resolved,
    config: EngineConfig,
    network: Decoder,
    loaded_drafter: LoadedDrafter,
    tokenizer: Tokenizer | None,
    progress_bar: ProgressBar = no_progress_bar,
    ranks: Ranks = ALONE,
    images: ImageReader = NoImages(),  # noqa: B008
) -> Engine:
    """Build the engine from loaded models."""
    limits, shape, needs = resolved.limits, network.config, loaded_drafter.needs
    division = divide(ranks, resolved, network.pool)
    state, sampling = _device_states(config, resolved, network)
    form = step_form(resolved, config)
    layout = shape.cache_layout(resolved.cache_dtype, division.layers)
    sizes = CacheSizes(resolved.num_blocks, config.block_size, state.num_slots, resolved.device)
    own = target_sizes(resolved, sizes, needs.features)
    cache = ModelCache(layout, own)
    runner = ModelRunner(network, cache, state, None, needs.stream_layers, of_target=True)
    can_share = shares_prefixes(config, layout, own)
    costs = _costs(resolved, config, shape, form)
    policy = draft_policy(resolved, costs, form)
    adapters = make_adapters(network.adapters, loaded_drafter.adapters, ranks)
    blocks = block_manager(resolved, own, can_share, division.num_parts)
    scheduler = Scheduler(limits, blocks, policy, adapters)
    resources = DrafterResources(
        state=state,
        sampling=sampling,
        cache_sizes=sizes,
        num_speculative_tokens=limits.num_speculative_tokens,
        target=network,
        captured=resolved.captures,
        target_cache=cache,
        gives_confidences=scheduler.policy.reads_confidences,
        shares_prefixes=can_share,
        synthetic_rates=_synthetic_rates(resolved),
        leads=ranks.leads or division.num_parts > 1,
    )
    grammars = Grammars(tokenizer, shape.vocab_size, resolved.eos_token_ids)
    graphs = graph_runner(resolved, form, state, sampling, network.adapters is not None, ranks)
    step = Step(
        *(scheduler, runner, loaded_drafter.build(resources), state, sampling),
        resources.synthetic_rates,
        Guidance(grammars, sampling, limits.num_speculative_tokens, division),
        graphs,
        runs_ahead=loaded_drafter.limits.on_device and config.async_scheduling is not False,
        rereads=needs.features,
        ranks=ranks,
        division=division,
        check_every=config.rank_check_interval,
    )
    capture_plain(graphs, step, not loaded_drafter.limits.on_device, progress_bar)
    if resolved.adaptive and ranks.leads:
        costs.begin(partial(calibrate, costs, step, resolved, policy.widths, config.block_size))
    reader = LogprobReader(step.rate, tokenizer, config.logprobs_mode == "raw_logprobs")
    media = MediaReader(config.allowed_local_media_path, config.allowed_media_domains)
    beside = tokenizer, grammars, costs, adapters, images, media, ranks
    return Engine(resolved, scheduler, step, reader, *beside)


def _device_states(
    config: EngineConfig, resolved: Resolved, network: Decoder
) -> tuple[DeviceState, SamplingState]:
    limits, device, axes = resolved.limits, resolved.device, network.ropes.num_composed > 0
    sizes = limits.max_num_seqs, limits.max_model_len, config.block_size
    state = DeviceState(*sizes, device, resolved.num_window_blocks > 0, axes)
    slots, vocab_size = state.num_slots, network.config.vocab_size
    columns, fp64 = network.head.columns, config.use_fp64_gumbel
    return state, SamplingState(slots, vocab_size, device, fp64, columns)


def _require_attention(drafter: LoadedDrafter) -> None:
    """Raise UsageError for a drafter with recurrent state, which cannot resume from KV blocks."""
    if not all(kept.blocks_resume for kept in drafter.layouts):
        raise UsageError(NO_STATES)


def _synthetic_rates(resolved: Resolved) -> torch.Tensor | None:
    """[L, K] float32 on the device."""
    rates = resolved.synthetic_rates
    return torch.tensor(rates, device=resolved.device) if rates else None


def _costs(
    resolved: Resolved, config: EngineConfig, shape: DecoderConfig, form: StepForm
) -> KeptCosts:
    """The cost model of steps, still without measurements."""
    device, most = resolved.device, resolved.limits.max_num_seqs
    kernels = kernels_for(device, resolved.dtype, config.batch_invariant)
    threads = [value for name, value, _ in resolved.reasons if name == "threads"]
    file = CostFile(
        {
            "version": import_module("slipstream").__version__,
            "model": [config.model, config.revision, config.load_format, repr(shape)],
            "drafter": [config.speculative_config, resolved.limits],
            "numbers": [resolved.dtype, resolved.cache_dtype, config.quantization],
            "device": [device_name(device), threads, kernels.network.backend],
            "ranks": [config.num_ranks, config.shares_experts],
            "captured": config.cudagraph_capture_sizes or resolved.captures,
        }
    )
    requests = [count for count in (1, 2, 4, 8, 16, 32, 64, 128, 256) if count < most]
    padded = form.bucket if isinstance(form, CapturedForm) else None
    return KeptCosts(padded, file, (*requests, most), captured_counts(resolved))
