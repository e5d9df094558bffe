"""Puts an engine together from loaded models."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module

import torch

from slipstream.cache.block_manager import BlockManager
from slipstream.cache.paged import KVSpec
from slipstream.cache.per_rank_blocks import PerRankBlocks
from slipstream.cache.spec import CacheLayout, CacheSizes, ModelCache
from slipstream.cache.state_places import StatePlaces
from slipstream.cache.window_blocks import WindowBlocks
from slipstream.core.config import EngineConfig
from slipstream.core.sampling_params import Verification
from slipstream.core.step_form import CapturedForm, ExactForm, StepForm, StepLimits
from slipstream.engine.adapters import Adapters, OtherRanks
from slipstream.engine.draft_policy import DraftPolicy, FixedPolicy
from slipstream.engine.drafting.calibration import calibrate
from slipstream.engine.drafting.kept_costs import CostFile, KeptCosts
from slipstream.engine.drafting.pace import paced
from slipstream.engine.drafting.policy import AdaptivePolicy
from slipstream.engine.drafting.sizes import captured_widths
from slipstream.engine.engine import Engine
from slipstream.engine.grammar import Grammars
from slipstream.engine.guidance import Guidance
from slipstream.engine.images import ImageReader
from slipstream.engine.launcher import Launcher
from slipstream.engine.logprobs import LogprobReader
from slipstream.engine.media import MediaReader
from slipstream.engine.ranks.division import divide
from slipstream.engine.ranks.ranks import Ranks
from slipstream.engine.resolve import Resolved
from slipstream.engine.scheduler import Scheduler
from slipstream.engine.warm_up import warm_up
from slipstream.kernels.registry import kernels_for
from slipstream.layers.adapters import AdapterSlots
from slipstream.models.decoder import Decoder
from slipstream.models.decoder_config import DecoderConfig
from slipstream.models.loading import ProgressBar
from slipstream.models.tokenizer import Tokenizer
from slipstream.runner.adapters import AdapterLoader
from slipstream.runner.capability import device_name
from slipstream.runner.device_state import DeviceState
from slipstream.runner.graphs import GraphRunner, Recorder
from slipstream.runner.model_runner import ModelRunner
from slipstream.runner.prefix_groups import PrefixGroups
from slipstream.sampling.state import SamplingState, Uses
from slipstream.speculative.drafter import DrafterResources, LoadedDrafter


def assemble(
    resolved: Resolved,
    config: EngineConfig,
    network: Decoder,
    loaded_drafter: LoadedDrafter,
    tokenizer: Tokenizer | None,
    progress_bar: ProgressBar,
    ranks: Ranks,
    images: ImageReader,
) -> Engine:
    limits, shape, needs = resolved.limits, network.config, loaded_drafter.needs
    division, form = divide(ranks, resolved, network.pool), step_form(resolved, config)
    state, sampling = _device_states(config, resolved, network)
    layout = shape.cache_layout(resolved.cache_dtype, division.layers)
    sizes = CacheSizes(resolved.num_blocks, config.block_size, state.num_slots, resolved.device)
    own = target_sizes(resolved, sizes, needs.features)
    cache = ModelCache(layout, own)
    record = pass_recorder(resolved, network)
    runner = ModelRunner(network, cache, state, None, needs.stream_layers, True, record)
    can_share, costs = shares_prefixes(config, layout, own), _costs(resolved, config, shape, form)
    late = late_tokens(loaded_drafter, can_share, limits)
    adapters = make_adapters(network.adapters, loaded_drafter.adapters, ranks)
    blocks = block_manager(resolved, own, can_share, division.num_parts, record)
    scheduler = Scheduler(limits, blocks, draft_policy(resolved, costs, form, late), adapters)
    resources = DrafterResources(
        state=state,
        sampling=sampling,
        cache_sizes=sizes,
        num_speculative_tokens=limits.num_speculative_tokens,
        target=network,
        captured=resolved.captures,
        record=record,
        target_cache=cache,
        gives_confidences=scheduler.policy.reads_confidences,
        shares_prefixes=can_share,
        synthetic_rates=_synthetic_rates(resolved),
        leads=ranks.leads or division.num_parts > 1,
    )
    grammars = Grammars(tokenizer, shape.vocab_size, resolved.eos_token_ids)
    graphs = graph_runner(resolved, form, state, sampling, network.adapters is not None, ranks)
    step = Launcher(
        *(scheduler, runner, loaded_drafter.build(resources), state, sampling),
        resources.synthetic_rates,
        Guidance(grammars, sampling, limits.num_speculative_tokens, division),
        graphs,
        runs_ahead=loaded_drafter.limits.on_device and config.async_scheduling is not False,
        needs=needs,
        ranks=ranks,
        division=division,
        check_every=config.rank_check_interval,
        groups=_prefix_groups(layout, state) if can_share else None,
    )
    if graphs is not None:
        graphs.capture_all(step.run, not loaded_drafter.limits.on_device, progress_bar)
    if ranks.leads:
        run_first_steps(step, resolved, config, costs, scheduler.policy.widths, late, progress_bar)
    reader = LogprobReader(step.rate, tokenizer, config.logprobs_mode == "raw_logprobs")
    media = MediaReader(config.allowed_local_media_path, config.allowed_media_domains)
    services = tokenizer, grammars, costs, adapters, images, media, ranks
    return Engine(resolved, scheduler, step, reader, *services)


def shares_prefixes(config: EngineConfig, layout: CacheLayout, sizes: CacheSizes) -> bool:
    """Whether requests reuse the cached prefixes of other requests."""
    resumes = layout.blocks_resume or sizes.num_checkpoints > 0
    return config.enable_prefix_caching and resumes


def _prefix_groups(layout: CacheLayout, state: DeviceState) -> PrefixGroups | None:
    """What finds requests whose shared blocks are read once; None: the ops do not, or no layer of
    the target has attention without a window."""
    full = [it for it in layout.specs if isinstance(it, KVSpec) and it.window is None]
    reads_once = kernels_for(state.device).network.reads_shared_once
    return PrefixGroups(state.block_size) if full and reads_once else None


def target_sizes(resolved: Resolved, sizes: CacheSizes, rereads: bool) -> CacheSizes:
    """`sizes` with what the target's layers alone have."""
    return replace(
        sizes,
        num_window_blocks=resolved.num_window_blocks,
        num_drafts=resolved.limits.num_speculative_tokens,
        num_checkpoints=resolved.num_checkpoints,
        rereads=int(rereads),
    )


def block_manager(
    resolved: Resolved,
    sizes: CacheSizes,
    shares_prefixes: bool,
    num_ranks: int,
    record: Recorder | None,
) -> BlockManager:
    """The manager that allocates the blocks of the target's cache, or one for each rank.

    Args:
        sizes: those of `target_sizes`.
        num_ranks: number of ranks that have caches of their own for different requests.
        record: captures passes over short prompts; None: they are not captured.
    """
    replays = record is not None or not resolved.captures
    make = partial(_manager_of_one, resolved, sizes, shares_prefixes, replays)
    return make() if num_ranks == 1 else PerRankBlocks([make() for _ in range(num_ranks)])


def _manager_of_one(
    resolved: Resolved, sizes: CacheSizes, shares_prefixes: bool, replays: bool
) -> BlockManager:
    window = states = None
    size = sizes.block_size
    if resolved.num_window_blocks:
        window = WindowBlocks(resolved.num_window_blocks, size, resolved.window)
    if shares_prefixes and sizes.num_checkpoints:
        interval = resolved.checkpoint_interval
        states = StatePlaces(sizes.num_checkpoints, size, interval, sizes.rereads, replays)
    return BlockManager(resolved.num_blocks, size, shares_prefixes, window, states)


def _device_states(
    config: EngineConfig, resolved: Resolved, network: Decoder
) -> tuple[DeviceState, SamplingState]:
    limits, device, axes = resolved.limits, resolved.device, network.ropes.num_composed > 0
    sizes = limits.max_num_seqs, limits.max_model_len, config.block_size
    state = DeviceState(*sizes, device, resolved.num_window_blocks > 0, axes)
    slots, vocab_size = state.num_slots, network.config.vocab_size
    columns, fp64 = network.head.columns, config.use_fp64_gumbel
    return state, SamplingState(slots, vocab_size, device, fp64, columns)


def _synthetic_rates(resolved: Resolved) -> torch.Tensor | None:
    """[L, K] float32 on the device."""
    rates = resolved.synthetic_rates
    return torch.tensor(rates, device=resolved.device) if rates else None


def graph_runner(
    resolved: Resolved,
    form: StepForm,
    state: DeviceState,
    sampling: SamplingState,
    adapted: bool,
    ranks: Ranks,
) -> GraphRunner | None:
    """The runner of captured steps; None if steps are not captured."""
    if not isinstance(form, CapturedForm):
        return None
    recorder = Recorder(resolved.device)
    ranks.reset_before_end(recorder.graphs)
    return GraphRunner(state, sampling, form, recorder, _of_drafts(resolved), adapted)


def pass_recorder(resolved: Resolved, network: Decoder) -> Recorder | None:
    """What captures passes over short prompts and last checkpoints; None: nothing does, and on a
    GPU launching the latter for all layers would take longer than reading the tokens again."""
    is_whole = network.pool is None and network.head.columns.num_ranks == 1
    return Recorder(resolved.device) if resolved.captures and is_whole else None


def run_first_steps(
    step: Launcher,
    resolved: Resolved,
    config: EngineConfig,
    costs: KeptCosts,
    widths: Sequence[int],
    late: int,
    progress_bar: ProgressBar,
) -> None:
    """Run steps of no request, to compile kernels and to measure costs.

    Args:
        widths: numbers of draft tokens that steps can have, rising from 0.
        late: see `late_tokens`.
    """
    if config.warm_up and resolved.captures:
        warm_up(step, resolved, widths, config.block_size, progress_bar, config.enable_lora)
    if resolved.knows_costs:
        # With a fixed K nothing is chosen by them, and benchmarks start many engines.
        briefly, measured = not resolved.adaptive, (costs, step, resolved, widths)
        measure = partial(calibrate, *measured, config.block_size, late_tokens=late)
        costs.begin(partial(measure, briefly=briefly), briefly)


def late_tokens(drafter: LoadedDrafter, can_share: bool, limits: StepLimits) -> int:
    """The most tokens of a prompt that the drafter computes when a request first drafts; 0 if it
    computes prompts together with the target."""
    if drafter.window is not None:
        return drafter.window.tokens
    return limits.max_model_len if drafter.limits.may_skip_steps and not can_share else 0


def draft_policy(resolved: Resolved, costs: KeptCosts, form: StepForm, late: int) -> DraftPolicy:
    """The policy that decides how many tokens are drafted; `late`: see `late_tokens`."""
    if resolved.adaptive:
        return AdaptivePolicy(resolved.limits, captured_counts(resolved), costs, form, late)
    policy = FixedPolicy(resolved.limits.num_speculative_tokens)
    return replace(policy, learn=paced(costs.observe)) if resolved.knows_costs else policy


def step_form(resolved: Resolved, config: EngineConfig) -> StepForm:
    limits = resolved.limits
    if not resolved.captures:
        return ExactForm()
    return CapturedForm(
        limits.max_num_seqs,
        captured_counts(resolved),
        packs=not limits.drafts_trees,
        sizes=config.cudagraph_capture_sizes,
    )


def captured_counts(resolved: Resolved) -> tuple[int, ...]:
    """Numbers of draft tokens that captured steps have."""
    if resolved.adaptive:
        return captured_widths(resolved.limits)
    return FixedPolicy(resolved.limits.num_speculative_tokens).widths


def _of_drafts(resolved: Resolved) -> frozenset[Uses]:
    """The features that all sampled requests with drafts use."""
    uses = {Verification.BLOCK: Uses.BLOCK, Verification.COUPLED: Uses.COUPLED}
    return frozenset(use for way, use in uses.items() if way is resolved.verification)


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
            "form": 3,  # files of earlier forms lack costs
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
    limits = resolved.limits
    return KeptCosts(
        *(padded, file, (*requests, most), captured_counts(resolved)),
        at_once=limits.drafts_at_once,
        # Captured steps run all passes of the network, whatever was looked up.
        looks_up=padded is None and limits.lookup_passes is not None,
    )


def make_adapters(
    target: AdapterSlots | None, drafter: AdapterSlots | None, ranks: Ranks
) -> Adapters:
    """The `Adapters` of an engine whose networks have these slots; None: they take no adapters."""
    if target is None:
        return Adapters()
    loader = AdapterLoader(target, drafter)
    others = OtherRanks(loader.parts, loader.write_part, ranks.tell)
    return Adapters(
        target.count, loader.read, loader.write, others if ranks.share.size > 1 else None
    )
