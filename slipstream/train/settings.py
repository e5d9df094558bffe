"""Every number that a training run depends on."""

import math
from dataclasses import dataclass, field, fields
from pathlib import Path

from slipstream.core.errors import UsageError

FEATURES = ("auto", "online", "disk")
DEVICES = ("auto", "cpu", "cuda")
LOSS_OPTIONS = ("place_decay", "drop_rate")
"""Settings of the loss that some recipes have no use for."""


@dataclass(frozen=True, kw_only=True)
class DrafterOptions:
    """What a drafter is made of; None lets its recipe choose.

    Attributes:
        draft_vocab_size: tokens that it drafts, the commonest of the text.
        share_head: it has no lm_head of its own and drafts over the target's whole vocabulary.
        share_embedding: it uses the target's embedding where others have one of their own.
        aux_layers: layers of the target whose incoming streams it reads; the number of layers
            stands for what leaves the last one.
        num_layers, num_heads, num_kv_heads, head_dim, intermediate_size: of its network.
        hidden_size: its width, where it may differ from the target's.
        norm_before_residual, norm_output: flags of EAGLE-3 heads.
        mask_token: id of the token that parallel drafting asks with.
        init: a checkpoint to begin with.
    """

    draft_vocab_size: int | None = None
    share_head: bool | None = None
    share_embedding: bool | None = None
    aux_layers: tuple[int, ...] | None = None
    num_layers: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int | None = None
    hidden_size: int | None = None
    norm_before_residual: bool | None = None
    norm_output: bool | None = None
    mask_token: int | None = None
    init: str | None = None

    def __post_init__(self) -> None:
        for name in (
            "draft_vocab_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "intermediate_size",
            "hidden_size",
        ):
            size = getattr(self, name)
            _require(size is None or size >= 1, name, "must be at least 1")


@dataclass(frozen=True)
class Answers:
    """How the target answers prompts and continues texts.

    Attributes:
        tokens: most of an answer.
        prompt_tokens: of a text that is continued.
        temperatures: in turn.
    """

    tokens: int = 192
    prompt_tokens: int = 64
    temperatures: tuple[float, ...] = (0.0, 1.0)


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """One run.

    Attributes:
        kind: of drafter, a recipe's name.
        target: a directory, a hub name or a demo.
        data: files and directories (`texts.py`), or one packed file (`Sequences.save`).
        out: gets the drafter, and in `training/` what a resumed run needs.
        generate: the target answers prompts, and continues the beginnings of texts.
        generate_tokens, generate_prompt_tokens, temperatures: see `Answers`.
        max_length: tokens of a sequence; None: 512, or what packed ones have.
        validation: share of the sequences that is held out.
        steps, minutes: the end, whichever comes first; the rate falls over them.
        batch_size, accumulate: sequences of a pass, and passes of a step.
        num_speculative_tokens: places of a draft that are trained and validated.
        place_decay: a place's loss counts by this to the power of its index.
        argmax_weight: of the cross-entropy of the target's first choice beside KL.
        features: of the target, computed with every batch (online) or once and kept (disk).
        max_feature_gb: what they may take on disk.
        checkpoint_every, validate_every, log_every: in steps.
        drop_rate: parallel drafting trains place k at rate^k of the rows (COD).

    None leaves a number to the recipe, or to the default of whoever heeds it.
    """

    kind: str
    target: str
    data: tuple[Path, ...]
    out: Path
    revision: str | None = None
    generate: bool = False
    generate_tokens: int | None = None
    generate_prompt_tokens: int | None = None
    temperatures: tuple[float, ...] | None = None
    max_length: int | None = None
    validation: float = 0.02
    steps: int | None = None
    minutes: float | None = None
    batch_size: int = 8
    accumulate: int = 1
    learning_rate: float | None = None
    warmup: float = 0.03
    weight_decay: float = 0.01
    clip: float = 0.5
    num_speculative_tokens: int | None = None
    place_decay: float | None = None
    argmax_weight: float = 0.0
    drop_rate: float | None = None
    features: str = "auto"
    max_feature_gb: float | None = None
    checkpoint_every: int = 500
    validate_every: int = 500
    log_every: int = 20
    device: str = "auto"
    dtype: str = "auto"
    seed: int = 0
    options: DrafterOptions = field(default_factory=DrafterOptions)

    def __post_init__(self) -> None:
        for name in (
            "generate_tokens",
            "generate_prompt_tokens",
            "batch_size",
            "accumulate",
            "checkpoint_every",
            "validate_every",
            "log_every",
        ):
            value = getattr(self, name)
            _require(value is None or value >= 1, name, "must be at least 1")
        length = self.max_length
        _require(length is None or length >= 16, "max_length", "must be at least 16")
        _require(0 < self.validation < 1, "validation", "must be a share between 0 and 1")
        _require(0 <= self.argmax_weight <= 1, "argmax_weight", "must be from 0 to 1")
        _require(0 <= self.warmup < 1, "warmup", "must be a share below 1")
        drop_rate, decay = self.drop_rate, self.place_decay
        good = drop_rate is None or 0 < drop_rate <= 1
        _require(good, "drop_rate", "must be above 0 and at most 1")
        good = decay is None or 0 < decay <= 1
        _require(good, "place_decay", "must be above 0 and at most 1")
        _require(self.features in FEATURES, "features", f"must be one of {', '.join(FEATURES)}")
        _require(self.device in DEVICES, "device", f"must be one of {', '.join(DEVICES)}")
        room = self.max_feature_gb
        _require(room is None or room > 0, "max_feature_gb", "must be above 0")
        heated = self.temperatures
        good = heated is None or (bool(heated) and all(0 <= one < math.inf for one in heated))
        _require(good, "temperatures", "must be numbers from 0 up")
        rate = self.learning_rate
        good = rate is None or (rate > 0 and math.isfinite(rate))
        _require(good, "learning_rate", "must be a number above 0")
        good = math.isfinite(self.weight_decay) and self.weight_decay >= 0
        _require(good, "weight_decay", "must be a number from 0 up")
        _require(self.clip > 0, "clip", "must be above 0")
        count = self.num_speculative_tokens
        _require(count is None or count >= 1, "num_speculative_tokens", "must be at least 1")
        if self.steps is None and self.minutes is None:
            raise UsageError("say when to end: --steps, --minutes, or both")
        _require(self.steps is None or self.steps >= 1, "steps", "must be at least 1")
        _require(self.minutes is None or self.minutes > 0, "minutes", "must be above 0")
        self._require_heeded()

    @property
    def answers(self) -> Answers:
        """How the target answers."""
        default = Answers()
        return Answers(
            self.generate_tokens or default.tokens,
            self.generate_prompt_tokens or default.prompt_tokens,
            self.temperatures or default.temperatures,
        )

    def require_only(self, known: frozenset[str]) -> None:
        """Refuse what the recipe of this kind would ignore: it heeds `known`, of what it may."""
        given = {one.name: getattr(self.options, one.name) for one in fields(DrafterOptions)}
        given |= {name: getattr(self, name) for name in LOSS_OPTIONS}
        for name, value in given.items():
            if value is not None and name not in known:
                flags = ", ".join(sorted(map(flag, known)))
                raise UsageError(
                    f"{flag(name)} means nothing to {self.kind}; of the drafter's flags it takes "
                    f"{flags}"
                )

    def _require_heeded(self) -> None:
        """Refuse what would be ignored beside the other settings."""
        for name in ("generate_tokens", "generate_prompt_tokens", "temperatures"):
            heeded = self.generate or getattr(self, name) is None
            _require(heeded, name, "tells how the target answers; give --generate as well")
        heeded = self.features != "online" or self.max_feature_gb is None
        _require(heeded, "max_feature_gb", "is for features on disk; leave --features online out")


def flag(name: str) -> str:
    """As the command line spells a field."""
    return f"--{name.replace('_', '-')}"


def _require(holds: bool, name: str, what: str) -> None:
    if not holds:
        raise UsageError(f"{flag(name)} {what}")
