"""The settings of training runs."""

import math
from dataclasses import dataclass, field
from pathlib import Path

from slipstream.core.errors import UsageError
from slipstream.core.flags import (
    REQUIRED,
    check_fields,
    flag,
    flag_name,
    parse_floats,
    parse_integers,
    spelled,
)

RECIPES = {
    "dflash": ("recipe_dflash.DFlashRecipe", "a DFlash drafter: a block of tokens in one pass."),
    "draft": ("language_model.DraftRecipe", "a draft model: a small language model."),
    "eagle3": ("recipe_eagle3.Eagle3Recipe", "an EAGLE-3 head: one layer over target features."),
    "medusa": ("recipe_medusa.MedusaRecipe", "Medusa heads: one head per draft position."),
    "mtp": ("recipe_mtp.MtpRecipe", "an MTP module: one layer over the last hidden state."),
    "p-eagle": (
        "recipe_p_eagle.PEagleRecipe",
        "a P-EAGLE head: EAGLE-3 with all tokens in one pass.",
    ),
    "pard": ("recipe_pard.PardRecipe", "a PARD drafter: a draft model with one pass."),
}
"""The kinds of drafters: the recipe's class, and what it trains. A new kind is one line here."""
LOSS_OPTIONS = ("place_decay", "drop_rate")
"""Settings of the loss that some recipes do not read."""
_ANSWERING = (
    "generate_tokens",
    "generate_prompt_tokens",
    "temperatures",
    "generate_minutes",
    "generate_batch",
)


@dataclass(frozen=True, kw_only=True)
class DrafterOptions:
    """Architecture options of a drafter; None means the recipe's default."""

    draft_vocab_size: int | None = flag(
        None,
        "Draft over the most frequent tokens of the training text only, this many.",
        panel="Drafter",
        at_least=1,
    )
    share_head: bool | None = flag(
        None, "Use the target's lm_head and draft over its whole vocabulary.", name="--share-head"
    )
    share_embedding: bool | None = flag(
        None,
        "Use the target's embedding, for drafters that have their own by default.",
        name="--share-embedding",
    )
    aux_layers: tuple[int, ...] | None = flag(
        None,
        "Layers of the target whose input hidden states the drafter reads, such as 2,18,33; the "
        "number of layers stands for the last one's output.",
        parse=parse_integers,
    )
    num_layers: int | None = flag(None, "Layers of the drafter.", at_least=1)
    num_heads: int | None = flag(None, "Attention heads of the drafter.", at_least=1)
    num_kv_heads: int | None = flag(None, "Key-value heads of the drafter.", at_least=1)
    head_dim: int | None = flag(None, "Dimension of its attention heads.", at_least=1)
    intermediate_size: int | None = flag(None, "Width of its feed-forward layers.", at_least=1)
    hidden_size: int | None = flag(
        None, "Width of the drafter, where it may differ from the target's.", at_least=1
    )
    norm_before_fc: bool | None = flag(
        None,
        "EAGLE-3: normalise the target's hidden states before the first projection, for targets "
        "where they are large (gpt-oss).",
        name="--norm-before-fc",
    )
    norm_before_residual: bool | None = flag(
        None,
        "EAGLE-3: the residual stream begins with the normalised hidden state.",
        name="--norm-before-residual",
    )
    norm_output: bool | None = flag(
        None, "EAGLE-3.1: the next step reads the output of the final norm.", name="--norm-output"
    )
    mask_token: int | None = flag(None, "Id of the mask token for parallel drafting.")
    init: str | None = flag(None, "Checkpoint of a drafter to start training from.")

    def __post_init__(self) -> None:
        check_fields(type(self), vars(self), spelled)


@dataclass(frozen=True)
class Answers:
    """How the target answers prompts and continues texts.

    Attributes:
        tokens: maximum number of tokens of an answer.
        prompt_tokens: number of first tokens of a text that are given as the prompt.
        temperatures: sampling temperatures, used in turn.
    """

    tokens: int = 192
    prompt_tokens: int = 64
    temperatures: tuple[float, ...] = (0.0, 1.0)


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """Settings of the training data; None means the default."""

    target: str = flag(
        REQUIRED, "The target: a local directory, a hub name, or a bundled demo.", argument=True
    )
    out: Path = flag(REQUIRED, "The file to write, such as chats.safetensors.")
    lora: Path | None = flag(
        None, "Directory of a LoRA adapter that is applied to the target.", metavar="<folder>"
    )
    data: tuple[Path, ...] = flag(
        REQUIRED,
        "Texts, .jsonl files of texts, chats or prompts, directories of such files, or a file from "
        "`slipstream train data` (repeatable).",
        panel="Data",
        metavar="<path>",
    )
    generate: bool = flag(
        False, "Train on the target's own answers to prompts and chats, and continuations of texts."
    )
    generate_tokens: int | None = flag(None, "Maximum tokens of an answer. [192]", at_least=1)
    generate_prompt_tokens: int | None = flag(
        None, "Tokens of a text to continue. [64]", at_least=1
    )
    temperatures: tuple[float, ...] | None = flag(
        None, "Sampling temperatures of the answers, used in turn. [0,1]", parse=parse_floats
    )
    generate_minutes: float | None = flag(
        None,
        "Minutes for the answers, loading included; prompts without one by then are left out, "
        "and the same command with more minutes continues.",
        above=0,
    )
    generate_batch: int | None = flag(
        None, "Prompts that the target answers at once. [64]", at_least=1
    )
    max_length: int | None = flag(
        None, "Tokens per training sequence. [512, or the length of packed ones]", at_least=16
    )
    revision: str | None = flag(None, "Branch, tag or commit of the target's hub name.")
    device: str = flag("auto", "auto, cpu or cuda.", panel="Run", choices=("auto", "cpu", "cuda"))
    dtype: str = flag(
        "auto", "dtype of matrix products: auto is bfloat16 on a GPU and float32 on a CPU."
    )
    seed: int = flag(0, "Random seed.")

    def __post_init__(self) -> None:
        check_fields(type(self), vars(self), spelled)
        signed = -(1 << 63) <= self.seed < 1 << 63
        _require(signed, "seed", f"must be a signed 64-bit integer, not {self.seed}")
        found = self.temperatures
        valid = found is None or (bool(found) and all(0 <= value < math.inf for value in found))
        _require(valid, "temperatures", "must be numbers from 0 up")
        for name in _ANSWERING:
            used = self.generate or getattr(self, name) is None
            _require(used, name, "says how the target answers; give --generate as well")

    @property
    def answers(self) -> Answers:
        default = Answers()
        return Answers(
            self.generate_tokens or default.tokens,
            self.generate_prompt_tokens or default.prompt_tokens,
            self.temperatures or default.temperatures,
        )


@dataclass(frozen=True, kw_only=True)
class TrainSettings(DataSettings):
    """One run of training; None leaves a value to the recipe, or to the default of its user.

    Attributes:
        kind: the recipe's name.
        out: also gets `training/`, which holds what a resumed run needs.
    """

    kind: str
    out: Path = flag(
        REQUIRED,
        "Directory for the drafter. An interrupted run continues when it is started again with the "
        "same flags.",
        metavar="<folder>",
    )
    steps: int | None = flag(None, "Optimizer steps.", panel="Training", at_least=1)
    minutes: float | None = flag(
        None, "Minutes of training; ends at this or --steps, whichever comes first.", above=0
    )
    batch_size: int = flag(8, "Sequences per forward and backward pass.", at_least=1)
    accumulate: int = flag(1, "Gradient accumulation: passes per optimizer step.", at_least=1)
    learning_rate: float | None = flag(None, "Peak learning rate. [the recipe's]", above=0)
    warmup: float = flag(
        0.03, "Share of the run in which the learning rate rises.", at_least=0, below=1
    )
    weight_decay: float = flag(0.01, "Weight decay of AdamW.", at_least=0)
    clip: float = flag(0.5, "Maximum gradient norm.", above=0)
    num_speculative_tokens: int | None = flag(
        None, "Draft positions to train and validate. [the recipe's]", also=("-k",), at_least=1
    )
    place_decay: float | None = flag(
        None,
        "Weight the loss of draft position k by this to the power of k. [the recipe's]",
        above=0,
        at_most=1,
    )
    argmax_weight: float = flag(
        0.0,
        "Weight of the cross-entropy with the target's most probable token; the rest of the loss "
        "is the KL divergence.",
        at_least=0,
        at_most=1,
    )
    drop_rate: float | None = flag(
        None,
        "For parallel drafting: train position k on this to the power of k of the rows. [0.7]",
        above=0,
        at_most=1,
    )
    validation: float = flag(0.02, "Share of the sequences held out.", above=0, below=1)
    features: str = flag(
        "auto",
        "Hidden states of the target: computed with every batch (online), computed once and kept "
        "(disk), or auto.",
        panel="Run",
        choices=("auto", "online", "disk"),
    )
    max_feature_gb: float | None = flag(
        None, "Maximum size of the hidden states on disk, in GB. [20]", above=0
    )
    checkpoint_every: int = flag(500, "Steps between checkpoints.", at_least=1)
    validate_every: int = flag(500, "Steps between validations.", at_least=1)
    log_every: int = flag(20, "Steps between lines of metrics.jsonl.", at_least=1)
    options: DrafterOptions = field(default_factory=DrafterOptions)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps is None and self.minutes is None:
            raise UsageError("give --steps, --minutes, or both")
        used = self.features != "online" or self.max_feature_gb is None
        _require(used, "max_feature_gb", "is for features on disk; leave --features online out")

    def require_only(self, known: frozenset[str]) -> None:
        """Raise UsageError for options that are not `known`, which the recipe would ignore."""
        given = vars(self.options) | {name: getattr(self, name) for name in LOSS_OPTIONS}
        for name, value in given.items():
            if value is not None and name not in known:
                flags = ", ".join(sorted(map(flag_name, known)))
                raise UsageError(
                    f"{flag_name(name)} has no effect on {self.kind}; of the drafter's flags it "
                    f"takes {flags}"
                )


def _require(holds: bool, name: str, what: str) -> None:
    if not holds:
        raise UsageError(f"{flag_name(name)} {what}")
