"""The tokenizer of an engine, and what has to fit between it and the model."""

from slipstream.core.config import EngineConfig
from slipstream.core.errors import CheckpointError
from slipstream.models.checkpoint import Checkpoint, resolve_checkpoint
from slipstream.models.decoder_config import DecoderConfig
from slipstream.models.harmony import find_harmony
from slipstream.models.tokenizer import Tokenizer


def eos_token_ids(checkpoint: Checkpoint, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """What ends an output: without a list in generation_config.json also the tokens that end one
    in the harmony format, since config.json has room for one of them only."""
    known = checkpoint.eos_token_ids
    if tokenizer is None or "eos_token_id" in checkpoint.generation_config:
        return known
    harmony = find_harmony(tokenizer)
    return known if harmony is None else tuple(dict.fromkeys((*known, *harmony.stops)))


def require_rows(tokenizer: Tokenizer, shape: DecoderConfig) -> None:
    """Raise CheckpointError for more tokens than the model has rows; added ones may lack one."""
    if tokenizer.num_usual_tokens > shape.vocab_size:
        raise CheckpointError(
            f"the tokenizer of {tokenizer.path} has {tokenizer.num_usual_tokens:,} tokens and the "
            f"model knows {shape.vocab_size:,}: it is that of another model; name the right one "
            "(--tokenizer), or download the model again"
        )


def read_tokenizer(config: EngineConfig, checkpoint: Checkpoint) -> Tokenizer | None:
    """The tokenizer that the options ask for; None where they ask for none."""
    if config.skip_tokenizer_init:
        return None
    if config.tokenizer is None:
        if config.tokenizer_revision not in (None, config.revision):
            return Tokenizer(resolve_checkpoint(config.model, config.tokenizer_revision))
        return Tokenizer(checkpoint.path)
    return Tokenizer(resolve_checkpoint(config.tokenizer, config.tokenizer_revision))
