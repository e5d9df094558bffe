"""Loads the models of an engine and puts it together."""

from dataclasses import replace
from functools import partial
from importlib import import_module

import torch

from slipstream.cache.block_manager import BlockManager
from slipstream.cache.spec import CacheLayout, CacheSizes, ModelCache
from slipstream.cache.state_places import StatePlaces
from slipstream.cache.window_blocks import WindowBlocks
from slipstream.core.config import STORED_QUANTIZATIONS, EngineConfig
from slipstream.core.errors import CheckpointError, UsageError
from slipstream.core.sampling_defaults import SamplingDefaults
from slipstream.core.step_form import CapturedForm, ExactForm, StepForm
from slipstream.core.verification import Verification
from slipstream.engine.adapters import Adapters
from slipstream.engine.draft_policy import DraftPolicy, FixedPolicy
from slipstream.engine.drafting.calibration import calibrate
from slipstream.engine.drafting.kept_costs import CostFile, KeptCosts
from slipstream.engine.drafting.policy import AdaptivePolicy, captured_widths
from slipstream.engine.engine import Engine
from slipstream.engine.grammar import Grammars
from slipstream.engine.guidance import Guidance
from slipstream.engine.image_loading import choose_family, image_reader, least_rows
from slipstream.engine.images import ImageReader, NoImages
from slipstream.engine.logprobs import LogprobReader
from slipstream.engine.media import MediaReader
from slipstream.engine.named_target import with_named_target
from slipstream.engine.ranks.leader import start_ranks
from slipstream.engine.ranks.ranks import ALONE, Ranks
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
from slipstream.kernels.registry import kernels_for
from slipstream.layers.adapters import AdapterSlots
from slipstream.models.catalogue import read_decoder_config
from slipstream.models.checkpoint import (
    Checkpoint,
    Replaced,
    resolve_checkpoint,
)
from slipstream.models.decoder import Decoder
from slipstream.models.decoder_config import DecoderConfig
from slipstream.models.generation_config import generation_folder, read_sampling_defaults
from slipstream.models.harmony import find_harmony
from slipstream.models.hub import HubAccess, reaching_hub
from slipstream.models.loading import (
    LoadOptions,
    ProgressBar,
    decoder_bytes,
    load_decoder,
    no_progress_bar,
)
from slipstream.models.quantized.catalogue import read_quantization, require_format
from slipstream.models.tokenizer import Tokenizer
from slipstream.runner.adapters import AdapterLoader
from slipstream.runner.capability import (
    choose_device,
    device_name,
    kept_formats,
    require_adapters,
    require_stored,
    stored_note,
)
from slipstream.runner.collectives import CollectiveError
from slipstream.runner.device_state import DeviceState
from slipstream.runner.graphs import GraphRunner, Recorder
from slipstream.runner.memory import gigabytes
from slipstream.runner.model_runner import ModelRunner
from slipstream.runner.threads import set_threads
from slipstream.sampling.state import SamplingState, Uses
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
    config: EngineConfig,
    progress_bar: ProgressBar = no_progress_bar,
    ranks: Ranks | None = None,
) -> Engine:
    """Load the models and size the cache.

    Args:
        ranks: of which this process is one; None: it leads those that the options ask for, which
            are started here.

    Raises:
        UsageError: options that contradict each other or ask for what is not there.
        CheckpointError: a checkpoint that is broken, unsupported or does not fit.
        RanksLostError: another process could not load its share.
    """
    with reaching_hub(HubAccess(config.download_dir, config.hf_token)):
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
    tokenizer = _tokenizer(config, checkpoint)
    if tokenizer is not None:
        _require_rows(tokenizer, shape)
    device, why = choose_device(config.device)
    reasons.add("device", device, why)
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
    stored = read_quantization(checkpoint.config, checkpoint.config_file)
    if config.quantization in STORED_QUANTIZATIONS:
        require_format(checkpoint, config.quantization)
        config = replace(config, quantization=None)
    if stored is not None:
        require_stored_precision(config, device, checkpoint.path.name, stored)
        reasons.add("checkpoint quantization", stored.description, stored_note(device))
    require_precision(config, device)
    if config.enable_lora:
        require_adapters(device)
    dtype = resolve_dtype(config, shape.dtype)
    room = WeightRoom(device, reasons)
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
        share=ranks.share,
        adapters=(config.max_loras, config.max_lora_rank) if config.enable_lora else None,
        progress_bar=progress_bar,
        memory_check=room.check,
    )
    size = decoder_bytes(checkpoint, shape, options)
    reasons.add("threads", *set_threads(device, dtype, config.threads, size))
    beside = replace(options, adapters=None, memory_check=room.beside(size))
    target = TargetModel(
        checkpoint.path, shape.vocab_size, beside, config.max_num_seqs, checkpoint.replaced
    )
    speculation = load_drafter(config.drafter_options, target)
    family = None  # several ranks read text only
    if ranks.share.size == 1:
        family = choose_family(config, checkpoint, device, reasons)
    if family is not None:
        shape = replace(shape, num_added_layers=family.num_added_layers)
        if config.max_num_batched_tokens is None and family.is_whole:
            rows = max(max_batched_tokens(config, device)[0], least_rows(config, family))
            config = replace(config, max_num_batched_tokens=rows)
        if family.several_axes:
            # Rows of a pass, and a token that is read again of each request.
            rows = max_batched_tokens(config, device)[0] + config.max_num_seqs
            options = replace(options, num_composed=rows)
    network = load_decoder(checkpoint, options, shape)
    if network.adapters is not None:
        _tell_adapters(network.adapters, reasons)
    tower = None if family is None else family.load(dtype, device)
    eos = _eos_token_ids(checkpoint, tokenizer)
    resolved = resolve(config, shape, eos, dtype, device, speculation, reasons, ranks.share)
    resolved = replace(resolved, sampling_defaults=defaults)
    drafter = speculation.drafter
    _require_attention(drafter)
    images = image_reader(config, resolved, family, tower, tokenizer)
    return assemble(resolved, config, network, drafter, tokenizer, progress_bar, ranks, images)


def _replaced(config: EngineConfig) -> Replaced:
    """What the user puts in place of the model directory's files."""
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
    """The engine around loaded models."""
    limits, device, shape = resolved.limits, resolved.device, network.config
    size, windowed = config.block_size, resolved.num_window_blocks > 0
    axes = network.ropes.num_composed > 0
    state = DeviceState(limits.max_num_seqs, limits.max_model_len, size, device, windowed, axes)
    sampling = SamplingState(state.num_slots, shape.vocab_size, device, config.use_fp64_gumbel)
    form = _step_form(resolved, config)
    layout = shape.cache_layout(resolved.cache_dtype, ranks.share)
    sizes = CacheSizes(resolved.num_blocks, size, state.num_slots, device)
    own = _target_sizes(resolved, sizes, loaded_drafter.needs.features)
    cache = ModelCache(layout, own)
    streams = loaded_drafter.needs.stream_layers
    runner = ModelRunner(network, cache, state, stream_layers=streams, of_target=True)
    shares_prefixes = _shares_prefixes(config, layout, own)
    costs = _costs(resolved, config, shape, form)
    policy, adapters = _draft_policy(resolved, costs, form), _adapters(network.adapters)
    scheduler = Scheduler(limits, _block_manager(resolved, own, shares_prefixes), policy, adapters)
    resources = DrafterResources(
        state=state,
        sampling=sampling,
        cache_sizes=sizes,
        num_speculative_tokens=limits.num_speculative_tokens,
        target=network,
        captured=resolved.captures,
        target_cache=cache,
        gives_confidences=scheduler.policy.reads_confidences,
        shares_prefixes=shares_prefixes,
        synthetic_rates=_synthetic_rates(resolved),
        leads=ranks.leads,
    )
    on_device = loaded_drafter.limits.on_device
    grammars = Grammars(tokenizer, shape.vocab_size, resolved.eos_token_ids)
    graphs = _graphs(resolved, form, state, sampling, network.adapters is not None)
    step = Step(
        scheduler,
        runner,
        loaded_drafter.build(resources),
        state,
        sampling,
        resources.synthetic_rates,
        Guidance(grammars, sampling, limits.num_speculative_tokens, ranks),
        graphs,
        runs_ahead=on_device and config.async_scheduling is not False,
        rereads=loaded_drafter.needs.features,
        ranks=ranks,
        check_every=config.rank_check_interval,
    )
    if graphs is not None:
        _capture(graphs, step, not on_device, progress_bar)
    if resolved.adaptive and ranks.leads:
        costs.begin(partial(calibrate, costs, step, resolved, policy.widths, size))
    reader = LogprobReader(step.logits, tokenizer, config.logprobs_mode == "raw_logprobs")
    media = MediaReader(config.allowed_local_media_path, config.allowed_media_domains)
    seen = images, media
    return Engine(
        resolved, scheduler, step, reader, tokenizer, grammars, costs, adapters, *seen, ranks
    )


def _graphs(
    resolved: Resolved, form: StepForm, state: DeviceState, sampling: SamplingState, adapted: bool
) -> GraphRunner | None:
    """What captures steps; None where nothing does."""
    if not isinstance(form, CapturedForm):
        return None
    recorder = Recorder(resolved.device)
    return GraphRunner(state, sampling, form, recorder, _of_drafts(resolved), adapted)


def _capture(graphs: GraphRunner, step: Step, guessed: bool, progress_bar: ProgressBar) -> None:
    """What plain requests need."""
    with progress_bar("capturing steps", graphs.num_lean(), "graphs") as progress:
        graphs.capture_all("step", step.run, guessed, progress)


def _adapters(slots: AdapterSlots | None) -> Adapters:
    if slots is None:
        return Adapters()
    loader = AdapterLoader(slots)
    return Adapters(slots.count, loader.read, loader.write)


def _tell_adapters(slots: AdapterSlots, reasons: Reasons) -> None:
    if not slots.modules:
        raise UsageError(
            "enable_lora: no layer of this model takes adapters, which are for projections of "
            "attention and of feed-forward layers without experts; leave it out"
        )
    size = f"{slots.count} of rank {slots.rank}"
    reasons.add("slots of adapters", size, f"max_loras, max_lora_rank: {gigabytes(slots.nbytes)}")


def _shares_prefixes(config: EngineConfig, layout: CacheLayout, sizes: CacheSizes) -> bool:
    """Whether requests begin behind prefixes that others have computed."""
    resumes = layout.blocks_resume or sizes.num_checkpoints > 0
    return config.enable_prefix_caching and resumes


def _target_sizes(resolved: Resolved, sizes: CacheSizes, rereads: bool) -> CacheSizes:
    """`sizes` with what the target's layers alone have."""
    return replace(
        sizes,
        num_window_blocks=resolved.num_window_blocks,
        num_drafts=resolved.limits.num_speculative_tokens,
        num_checkpoints=resolved.num_checkpoints,
        rereads=int(rereads),
    )


def _require_attention(drafter: LoadedDrafter) -> None:
    """Raise UsageError for a drafter that cannot go on from blocks alone."""
    if not all(kept.blocks_resume for kept in drafter.layouts):
        raise UsageError(NO_STATES)


def _synthetic_rates(resolved: Resolved) -> torch.Tensor | None:
    """[L, K] float32 on the device."""
    rates = resolved.synthetic_rates
    return torch.tensor(rates, device=resolved.device) if rates else None


def _costs(
    resolved: Resolved, config: EngineConfig, shape: DecoderConfig, form: StepForm
) -> KeptCosts:
    """What steps cost; nothing is known of it yet."""
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
            "captured": config.cudagraph_capture_sizes or resolved.captures,
        }
    )
    requests = [count for count in (1, 2, 4, 8, 16, 32, 64, 128, 256) if count < most]
    padded = form.bucket if isinstance(form, CapturedForm) else None
    return KeptCosts(padded, file, (*requests, most), _widths(resolved))


def _draft_policy(resolved: Resolved, costs: KeptCosts, form: StepForm) -> DraftPolicy:
    """What decides how much is drafted."""
    if resolved.adaptive:
        return AdaptivePolicy(resolved.limits, _widths(resolved), costs, form)
    return FixedPolicy(resolved.limits.num_speculative_tokens)


def _step_form(resolved: Resolved, config: EngineConfig) -> StepForm:
    limits = resolved.limits
    if not resolved.captures:
        return ExactForm()
    return CapturedForm(
        limits.max_num_seqs,
        _widths(resolved),
        packs=not limits.drafts_trees,
        sizes=config.cudagraph_capture_sizes,
    )


def _widths(resolved: Resolved) -> tuple[int, ...]:
    """Numbers of draft tokens that captured steps have."""
    if resolved.adaptive:
        return captured_widths(resolved.limits)
    return FixedPolicy(resolved.limits.num_speculative_tokens).widths


def _of_drafts(resolved: Resolved) -> frozenset[Uses]:
    """What sampled requests with drafts use, all of them."""
    uses = {Verification.BLOCK: Uses.BLOCK, Verification.COUPLED: Uses.COUPLED}
    return frozenset(use for way, use in uses.items() if way is resolved.verification)


def _block_manager(resolved: Resolved, sizes: CacheSizes, shares_prefixes: bool) -> BlockManager:
    window = states = None
    size = sizes.block_size
    if resolved.num_window_blocks:
        window = WindowBlocks(resolved.num_window_blocks, size, resolved.window)
    if shares_prefixes and sizes.num_checkpoints:
        interval = resolved.checkpoint_interval
        states = StatePlaces(sizes.num_checkpoints, size, interval, sizes.rereads)
    return BlockManager(resolved.num_blocks, size, shares_prefixes, window, states)


def _eos_token_ids(checkpoint: Checkpoint, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """What ends an output: without a list in generation_config.json also the tokens that end one
    in the harmony format, since config.json has room for one of them only."""
    known = checkpoint.eos_token_ids
    if tokenizer is None or "eos_token_id" in checkpoint.generation_config:
        return known
    harmony = find_harmony(tokenizer)
    return known if harmony is None else tuple(dict.fromkeys((*known, *harmony.stops)))


def _require_rows(tokenizer: Tokenizer, shape: DecoderConfig) -> None:
    """Raise CheckpointError for more tokens than the model has rows; added ones may lack one."""
    if tokenizer.num_usual_tokens > shape.vocab_size:
        raise CheckpointError(
            f"the tokenizer of {tokenizer.path} has {tokenizer.num_usual_tokens:,} tokens and the "
            f"model knows {shape.vocab_size:,}: it is that of another model; name the right one "
            "(--tokenizer), or download the model again"
        )


def _tokenizer(config: EngineConfig, checkpoint: Checkpoint) -> Tokenizer | None:
    if config.skip_tokenizer_init:
        return None
    if config.tokenizer is None:
        if config.tokenizer_revision not in (None, config.revision):
            return Tokenizer(resolve_checkpoint(config.model, config.tokenizer_revision))
        return Tokenizer(checkpoint.path)
    return Tokenizer(resolve_checkpoint(config.tokenizer, config.tokenizer_revision))
