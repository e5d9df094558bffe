"""Whether a checkpoint can draft for a target, and whether it can be faster."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from slipstream.cli.checkpoint_facts import CheckpointFacts
from slipstream.core.errors import CheckpointError

if TYPE_CHECKING:
    from slipstream.models.decoder_config import DecoderConfig

_LARGE = 0.25  # at this share of the target, four draft tokens cost about one target pass


@dataclass(frozen=True)
class Fit:
    """How a checkpoint fits a target as a drafter.

    Attributes:
        problems: reasons why it does not fit.
        notes: advice on using it.
        relative_size: its parameters divided by the target's.
    """

    problems: tuple[str, ...]
    notes: tuple[str, ...]
    relative_size: float | None

    @property
    def fits(self) -> bool:
        return not self.problems

    def document(self) -> dict[str, Any]:
        return {"fits": self.fits, **asdict(self)}


def check_fit(draft: CheckpointFacts, target: CheckpointFacts) -> Fit:
    """Compare vocabularies, sizes and context lengths; tensors that do not load fit nothing."""
    from slipstream.speculative.drafter import NO_STATES

    problems: list[str] = []
    notes: list[str] = []
    share = None
    if draft.num_parameters is not None and target.num_parameters is not None:
        share = draft.num_parameters / target.num_parameters
    if target.config is None or target.head is not None:
        return Fit((f"{target.checkpoint.path} is no language model",), (), share)
    problems.extend(it for it in (draft.problem, target.problem) if it is not None)
    if draft.head is not None:
        problems.extend(draft.head.problems(target.config))
        return Fit(tuple(problems), draft.head.notes, share)
    assert draft.config is not None, "a language model has one"
    if draft.num_parameters is None:
        problems.append(f"{draft.checkpoint.path} has no weights; download them")
    if not draft.config.cache_layout(draft.config.dtype).blocks_resume:
        problems.append(NO_STATES)
    mismatch = _vocabulary_problem(draft, draft.config, target, target.config)
    if mismatch:
        problems.append(mismatch)
    if share is not None and share >= 1:
        notes.append(
            f"it has {share:.2f} times the parameters of the target, so drafting costs more time "
            "than it can save; choose a smaller one"
        )
    elif share is not None and share > _LARGE:
        notes.append(
            f"it has {share:.0%} of the target's parameters, which is large for a drafter: keep "
            "num_speculative_tokens small"
        )
    ours, theirs = draft.config.max_position_embeddings, target.config.max_position_embeddings
    if ours < theirs:
        notes.append(
            f"its context is {ours} tokens and the target's {theirs}: requests run without drafts "
            f"beyond {ours} tokens"
        )
    notes.extend(_parallel_note(draft))
    return Fit(tuple(problems), tuple(notes), share)


def _parallel_note(draft: CheckpointFacts) -> list[str]:
    from slipstream.speculative.catalogue import parallel_method
    from slipstream.speculative.parallel.rows import parallel_note, read_mask_token

    method = parallel_method(draft.kind)
    if method is None:
        return []
    name = method.name if draft.kind == method.name else f"{method.name}, variant {draft.kind}"
    return [parallel_note(name, read_mask_token(draft.checkpoint))]


def _vocabulary_problem(
    draft: CheckpointFacts, ours: "DecoderConfig", target: CheckpointFacts, theirs: "DecoderConfig"
) -> str | None:
    from slipstream.speculative.draft_model.vocabularies import require_same_vocabulary

    try:
        require_same_vocabulary(
            target.checkpoint.path, theirs.vocab_size, draft.checkpoint.path, ours.vocab_size
        )
    except CheckpointError as error:
        return str(error)
    return None
