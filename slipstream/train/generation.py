"""Text that the target writes itself, through the engine.

A drafter has to predict the target's own text, which differs from that of any corpus (Zhou et al.
2023, arXiv 2310.08461).
"""

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from slipstream.core.adapters import LoRARequest
from slipstream.core.errors import UsageError, counted
from slipstream.core.sampling_params import SamplingParams
from slipstream.engine.llm import LLM
from slipstream.engine.prompts import TokensPrompt
from slipstream.models.adapters import adapter_rank
from slipstream.models.catalogue import read_decoder_config
from slipstream.models.chat_template import ChatTemplate
from slipstream.models.checkpoint import Checkpoint, resolve_checkpoint
from slipstream.models.tokenizer import Tokenizer
from slipstream.train.files import SOURCE, append_line, read_lines, write_text
from slipstream.train.sequences import Document
from slipstream.train.settings import DataSettings
from slipstream.train.texts import TextEntry

_QUEUED = 2048  # prompts that the engine is given together, so that few are waited for at the end
_RUNNING = 64


def generate_answers(
    entries: Sequence[TextEntry],
    settings: DataSettings,
    length: int,
    tokenizer: Tokenizer,
    file: Path,
    source: str,
    progress: Callable[[int], None],
) -> list[Document]:
    """Let the target answer all prompts, and continue texts from their first tokens.

    If the settings limit the time, only the prompts that were answered are returned.

    Args:
        length: maximum number of tokens of a sequence.
        file: the answers are saved here, so that an interrupted run can be resumed.
        source: identifies data and settings; saved answers from other ones are dropped.
        progress: called with the number of newly answered prompts.

    Raises UsageError if no answer ended in time.
    """
    prompts = [_prompt(entry, settings, length, tokenizer) for entry in entries]
    answers = list(_read_kept(file, source))[: len(prompts)]
    progress(len(answers))
    if len(answers) < len(prompts):
        lines = map(json.dumps, (_header(source), *answers))
        write_text(file, "".join(f"{line}\n" for line in lines))
        for answer in _answers(prompts, len(answers), settings):
            append_line(file, json.dumps(answer))  # kept even if the process is killed
            answers.append(answer)
            progress(1)
    if not answers:
        raise UsageError(
            f"no answer ended within --generate-minutes {settings.generate_minutes:g}; give more"
        )
    return [
        # Prompts that are text, not messages, are learned, too.
        Document([*prompt, *answer], [not entry.messages] * len(prompt) + [True] * len(answer))
        for entry, prompt, answer in zip(entries, prompts, answers, strict=False)
    ]


def require_enough(
    entries: Sequence[TextEntry], settings: DataSettings, length: int, tokenizer: Tokenizer
) -> None:
    """Raise UsageError, before anything is generated, if there can be only one sequence."""
    most = 0
    for entry in entries:
        most += len(_prompt(entry, settings, length, tokenizer)) + settings.answers.tokens + 1
        if most > length:
            return
    raise UsageError(
        f"{counted(len(entries), 'prompt')} with answers make {most} tokens at most, which fit "
        f"into one sequence of {length}; give more prompts, or a smaller --max-length"
    )


def _prompt(
    entry: TextEntry, settings: DataSettings, length: int, tokenizer: Tokenizer
) -> list[int]:
    if entry.messages:
        messages = entry.messages if entry.wants_answer else entry.messages[:-1]
        text = ChatTemplate(tokenizer).render(messages or entry.messages)
        ids = tokenizer.encode(text, add_special_tokens=False)
    else:
        assert entry.text is not None
        ids = tokenizer.encode(entry.text)
        if not entry.is_prompt:
            ids = ids[: settings.answers.prompt_tokens]
    # A prompt leaves room for its answer in a sequence.
    return ids[: max(1, length - 1)]


def _answers(
    prompts: Sequence[list[int]], num_kept: int, settings: DataSettings
) -> Iterator[list[int]]:
    """Answers to the prompts after the kept ones, in order, each as soon as possible."""
    end = time.monotonic() + 60 * (settings.generate_minutes or math.inf)
    checkpoint = Checkpoint(resolve_checkpoint(settings.target, settings.revision))
    longest, most_tokens = max(map(len, prompts)), settings.answers.tokens
    adapter: LoRARequest | None = None
    adapters: dict[str, Any] = {}
    if settings.lora is not None:
        adapter = LoRARequest(settings.lora.name or "adapter", 1, settings.lora)
        rank = adapter_rank(settings.lora)
        adapters = {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank}
    llm = LLM(
        settings.target,
        revision=settings.revision,
        device=settings.device,
        dtype=settings.dtype,
        skip_tokenizer_init=True,
        max_num_seqs=settings.generate_batch or _RUNNING,
        # The cache takes no more than that, so that several processes may share a GPU.
        max_model_len=min(
            longest + most_tokens, read_decoder_config(checkpoint).max_position_embeddings
        ),
        **adapters,
    )
    temperatures = settings.answers.temperatures
    following = num_kept
    for start in range(num_kept, len(prompts), _QUEUED):
        part = prompts[start : start + _QUEUED]
        params = [
            SamplingParams(
                temperature=temperatures[number % len(temperatures)],
                max_tokens=most_tokens,
                seed=settings.seed + number,
            )
            for number in range(start, start + len(part))
        ]
        done: dict[int, list[int]] = {}
        asked = [TokensPrompt(prompt_token_ids=ids) for ids in part]
        for output in llm.stream(asked, params, adapter, whole=True):
            output.require_sound()
            # The engine counts its requests from 0.
            done[num_kept + int(output.request_id)] = list(output.outputs[0].token_ids)
            while following in done:
                yield done.pop(following)
                following += 1
            if time.monotonic() > end:
                return


def _read_kept(file: Path, source: str) -> Iterator[list[int]]:
    """The answers of an interrupted run, without a line that was cut short."""
    lines = read_lines(file)
    if next(lines, None) == _header(source):
        yield from lines


def _header(source: str) -> dict[str, str]:
    """The first line of a file of answers."""
    return {SOURCE: source}
