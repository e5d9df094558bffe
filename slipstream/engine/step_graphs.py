"""The form of an engine's steps, and the graphs in which they are captured."""

from slipstream.core.config import EngineConfig
from slipstream.core.sampling_params import Verification
from slipstream.core.step_form import CapturedForm, ExactForm, StepForm
from slipstream.engine.draft_policy import DraftPolicy, FixedPolicy
from slipstream.engine.drafting.kept_costs import KeptCosts
from slipstream.engine.drafting.policy import AdaptivePolicy, captured_widths
from slipstream.engine.ranks.ranks import Ranks
from slipstream.engine.resolve import Resolved
from slipstream.engine.step import Step
from slipstream.models.loading import ProgressBar
from slipstream.runner.device_state import DeviceState
from slipstream.runner.graphs import GraphRunner, Recorder
from slipstream.sampling.state import SamplingState, Uses


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
    ranks.outlive(recorder.graphs)
    return GraphRunner(state, sampling, form, recorder, _of_drafts(resolved), adapted)


def capture_plain(
    graphs: GraphRunner | None, step: Step, guessed: bool, progress_bar: ProgressBar
) -> None:
    """Capture the graphs of requests without rare features."""
    if graphs is not None:
        with progress_bar("capturing steps", graphs.num_lean(), "graphs") as progress:
            graphs.capture_all("step", step.run, guessed, progress)


def draft_policy(resolved: Resolved, costs: KeptCosts, form: StepForm) -> DraftPolicy:
    """The policy that decides how many tokens are drafted."""
    if resolved.adaptive:
        return AdaptivePolicy(resolved.limits, captured_counts(resolved), costs, form)
    return FixedPolicy(resolved.limits.num_speculative_tokens)


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
