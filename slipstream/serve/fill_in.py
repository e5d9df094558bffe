"""Fill-in-the-middle prompts, for the field `suffix`.

The order is prefix, suffix, middle (PSM) of Bavarian et al. 2022 (arXiv 2207.14255): the model
generates the text between prefix and suffix.
"""

from typing import Final

from slipstream.engine.prompts import Prompt
from slipstream.models.tokenizer import Tokenizer
from slipstream.serve.errors import bad_request

# The tokens in front of the prefix, of the suffix and of the middle, by vocabulary.
_MARKS: Final = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # noqa: RUF001  DeepSeek-Coder
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
)


def fill_in(prompt: Prompt, suffix: str, tokenizer: Tokenizer, add_special_tokens: bool) -> Prompt:
    """Make the prompt for the text between `prompt` and `suffix`; ApiError if the vocabulary has no
    marks for it, or the prompt is not a text."""
    known = ([tokenizer.token_to_id(mark) for mark in marks] for marks in _MARKS)
    begin, middle, end = next((ids for ids in known if None not in ids), (None,) * 3)
    if begin is None or middle is None or end is None:
        raise bad_request(
            "suffix needs a model whose vocabulary has marks for filling in, such as "
            "<|fim_middle|>; leave it out, and put what the model needs into prompt",
            "suffix",
        )
    if not isinstance(prompt, str):
        raise bad_request("suffix goes with a prompt that is a text", "suffix")
    prefix_ids = tokenizer.encode(prompt, add_special_tokens=False)
    suffix_ids = tokenizer.encode(suffix, add_special_tokens=False)
    head: list[int] = []
    if add_special_tokens:  # they come in front of the marks
        whole = tokenizer.encode(prompt)
        size = len(whole) - len(prefix_ids)
        head = whole[:size] if whole[size:] == prefix_ids else []
    return {"prompt_token_ids": [*head, begin, *prefix_ids, middle, *suffix_ids, end]}
