"""The keys of `speculative_config` that control how a drafter's network is loaded and sampled."""

from dataclasses import dataclass, replace

import torch

from slipstream.core.config_values import CACHE_DTYPES
from slipstream.core.errors import UsageError
from slipstream.layers.parameters import WHOLE
from slipstream.models.loading import LoadOptions, dtype_named
from slipstream.runner.capability import resolve_cache_dtype
from slipstream.speculative.draft_vocabulary import DraftVocabularyConfig, read_draft_vocabulary
from slipstream.speculative.options import Options, TargetModel

# From this maximum length on, adaptive drafters get a window by default (docs/drafters.md).
LONG_TEXT, LONG_TEXT_WINDOW = 8192, 1024
_WHOLE_HEAD = "every rank runs the few layers of a head by itself; use 1"
_CACHE_DTYPE = "kv_cache_dtype"
_ONE_WAY = "this method has one way to draft; leave it out"


@dataclass(frozen=True, kw_only=True)
class ModelKeys:
    """The keys that a method supports beyond those common to all networks.

    Attributes:
        parallel: whether it drafts all tokens in one pass, the only value allowed for
            `parallel_drafting`; `remedy` completes the error message for the other value.
        mask_token, vocabulary, other_tokenizer: whether `pard_token`, `draft_vocab_size` and
            `use_heterogeneous_vocab` are supported.
        cache, window: whether `kv_cache_dtype` and `draft_window` are supported.
        in_target: without `model`, the head is read from the target's own checkpoint.
        splits: the network supports tensor parallelism.
        whole_target: it needs the whole target, and so cannot run with only a share of it.
    """

    parallel: bool = False
    remedy: str = _ONE_WAY
    mask_token: bool = False
    vocabulary: bool = False
    other_tokenizer: bool = False
    cache: bool = False
    window: bool = False
    in_target: bool = False
    splits: bool = False
    whole_target: bool = False


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """How a drafter's network is loaded and sampled.

    Attributes:
        model: None for a head in the target's own checkpoint.
        greedy_only: `draft_sample_method` is greedy.
        mask_token: `pard_token`; None: the checkpoint has it.
        vocabulary: the draft vocabulary; None: all tokens.
        maps_tokens: `use_heterogeneous_vocab`: its tokenizer may differ from the target's.
        kv_cache_dtype: dtype of the network's keys and values; auto: the one in which it computes.
        draft_window: attention is limited to the last `draft_window` tokens and the first few;
            None: no limit, or the default for long texts if the engine is `adaptive`.
        adaptive: the engine chooses the number of draft tokens.
        num_ranks: `draft_tensor_parallel_size`, the number of ranks over which the network is
            split; None: the faster choice, if the method supports it, else 1.
        whole_target: see `ModelKeys`.
    """

    model: str | None
    revision: str | None
    dtype: str | None
    quantization: str | None
    max_model_len: int | None
    greedy_only: bool
    mask_token: int | None = None
    vocabulary: DraftVocabularyConfig | None = None
    maps_tokens: bool = False
    kv_cache_dtype: str = "auto"
    draft_window: int | None = None
    adaptive: bool = False
    num_ranks: int | None = None
    whole_target: bool = False

    def window_within(self, longest: int) -> int | None:
        """The window for requests of up to `longest` tokens; None if it is not smaller."""
        window = self.draft_window
        if window is None and self.adaptive and longest >= LONG_TEXT:
            window = LONG_TEXT_WINDOW
        return window if window is not None and window < longest else None

    def require_ranks(self, num_ranks: int) -> None:
        """Raise UsageError if the drafter cannot run with a target that `num_ranks` ranks share."""
        if self.whole_target and num_ranks > 1:
            raise UsageError(
                "an assistant reads all keys and values of its target, of which each process of "
                "tensor_parallel_size has some heads; give that as 1, or use another drafter"
            )
        if (self.num_ranks or 1) > 1 and self.maps_tokens:
            raise UsageError(
                "speculative_config: use_heterogeneous_vocab needs the draft model's "
                "embeddings on one rank; give draft_tensor_parallel_size 1"
            )
        self.require_num_ranks(num_ranks)

    def require_num_ranks(self, num_ranks: int) -> None:
        """Raise UsageError if `draft_tensor_parallel_size` does not fit the target's ranks."""
        if num_ranks % (self.num_ranks or 1):
            fitting = [str(it) for it in range(1, num_ranks + 1) if num_ranks % it == 0]
            raise UsageError(
                f"speculative_config: draft_tensor_parallel_size={self.num_ranks} does not divide "
                f"the target's tensor_parallel_size ({num_ranks}), so that some ranks would have "
                f"no share of the drafter; give one that does ({', '.join(fitting)})"
            )

    def pages_in(self, load: LoadOptions) -> torch.dtype:
        """The dtype of its keys and values, if the network is loaded with `load`."""
        option = f"speculative_config: {_CACHE_DTYPE}"
        return resolve_cache_dtype(self.kv_cache_dtype, load.dtype, load.device, option)

    def load_options(self, target: TargetModel, usual_ranks: int = 1) -> LoadOptions:
        """The target's load options, except where the user has set others.

        Args:
            usual_ranks: number of ranks over which the network is split if the user has not set it.
        """
        dtype = dtype_named(self.dtype) if self.dtype else target.load.dtype
        self.require_num_ranks(target.load.share.size)
        share, num_ranks = WHOLE, self.num_ranks or usual_ranks
        if num_ranks > 1:
            assert target.load.share.within is not None, "there are other ranks"
            share = target.load.share.within(num_ranks)
        return replace(target.load, dtype=dtype, quantization=self.quantization, share=share)


def _read_cache_dtype(options: Options) -> str:
    asked = options.take_str(_CACHE_DTYPE, "auto")
    if asked not in CACHE_DTYPES:
        raise UsageError(
            f"speculative_config: {_CACHE_DTYPE} must be one of {', '.join(CACHE_DTYPES)}, not "
            f"{asked!r}"
        )
    return asked


def read_model_options(options: Options, method: str, keys: ModelKeys) -> ModelOptions:
    """Read the keys of a network drafter; keys that other engines support are read or refused."""
    options.take_only("parallel_drafting", keys.parallel, keys.remedy)
    num_ranks: int | None = 1
    if keys.splits:
        num_ranks = options.take_positive("draft_tensor_parallel_size")
    else:
        options.take_only("draft_tensor_parallel_size", 1, _WHOLE_HEAD)
    model, revision = options.take_str("model", None), options.take_str("revision", None)
    if keys.in_target and model == method:
        model = None
    if model is None and not keys.in_target:
        raise UsageError(f"speculative_config: method {method} needs model, a checkpoint")
    if model is None and revision is not None:
        raise UsageError(
            "speculative_config: revision belongs to model, and without model the modules are "
            "those of the target's own checkpoint; leave it out"
        )
    return ModelOptions(
        model=model,
        revision=revision,
        dtype=options.take_str("dtype", None),
        quantization=options.take_quantization(),
        max_model_len=options.take_positive("max_model_len"),
        greedy_only=options.take_greedy_only(),
        mask_token=options.take_int("pard_token", None) if keys.mask_token else None,
        vocabulary=read_draft_vocabulary(options) if keys.vocabulary else None,
        maps_tokens=keys.other_tokenizer and options.take_bool("use_heterogeneous_vocab"),
        kv_cache_dtype=_read_cache_dtype(options) if keys.cache else "auto",
        draft_window=options.take_positive("draft_window") if keys.window else None,
        num_ranks=num_ranks,
        whole_target=keys.whole_target,
    )
