"""`suffix`: what stands between two texts, by the marks that a vocabulary has for that.

The form of all of them is that of Bavarian et al. 2022 (arXiv 2207.14255): the text before, the
text behind, and then what the model writes between the two.
"""

from typing import Final

from slipstream.engine.prompts import Prompt
from slipstream.models.tokenizer import Tokenizer
from slipstream.serve.errors import bad_request

# Tokens before the text before, before the text behind, and before what is to be filled in.
_MARKS: Final = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # noqa: RUF001  DeepSeek-Coder
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
)


def fill_in(prompt: Prompt, suffix: str, tokenizer: Tokenizer, add_special_tokens: bool) -> Prompt:
    """The prompt that asks for what stands between `prompt` and `suffix`.

    Raises:
        ApiError: the vocabulary has no marks for that, or the prompt is not a text.
    """
    marks = next(filter(None, (_ids(tokenizer, marks) for marks in _MARKS)), None)
    if marks is None:
        raise bad_request(
            "suffix needs a model whose vocabulary has marks for filling in, such as "
            "<|fim_middle|>; leave it out, and put what the model needs into prompt",
            "suffix",
        )
    if not isinstance(prompt, str):
        raise bad_request("suffix goes with a prompt that is a text", "suffix")
    before = tokenizer.encode(prompt, add_special_tokens=False)
    behind = tokenizer.encode(suffix, add_special_tokens=False)
    head: list[int] = []
    if add_special_tokens:  # which stand in front of the marks
        whole = tokenizer.encode(prompt)
        size = len(whole) - len(before)
        head = whole[:size] if whole[size:] == before else []
    begin, middle, end = marks
    return {"prompt_token_ids": [*head, begin, *before, middle, *behind, end]}


def _ids(tokenizer: Tokenizer, marks: tuple[str, str, str]) -> tuple[int, int, int] | None:
    first, second, third = (tokenizer.token_to_id(mark) for mark in marks)
    if first is None or second is None or third is None:
        return None
    return first, second, third
