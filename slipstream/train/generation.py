"""Text that the target writes itself, through the engine.

A drafter is asked about the target's own words, which are not quite those of any corpus (Zhou et
al. 2023, arXiv 2310.08461).
"""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from slipstream.core.errors import UsageError
from slipstream.core.sampling_params import SamplingParams
from slipstream.core.wording import counted
from slipstream.engine.llm import LLM
from slipstream.engine.prompts import TokensPrompt
from slipstream.models.chat_template import ChatTemplate
from slipstream.models.tokenizer import Tokenizer
from slipstream.train.files import append_line, write_text
from slipstream.train.sequences import Document
from slipstream.train.settings import DataSettings
from slipstream.train.texts import Entry

_AT_ONCE = 512  # prompts that the engine has at once


def generated(
    entries: Sequence[Entry],
    settings: DataSettings,
    length: int,
    tokenizer: Tokenizer,
    file: Path,
    source: str,
    progress: Callable[[int], None],
) -> list[Document]:
    """Every prompt with the target's answer; texts are continued from their beginning.

    Args:
        length: of a sequence.
        file: keeps the answers, so that an interrupted run goes on where it was.
        source: tells the data and settings that they answer; answers to others are not kept.
        progress: is called with the number of prompts just done.
    """
    prompts = [_prompt(entry, settings, length, tokenizer) for entry in entries]
    answers = list(_kept(file, source))[: len(prompts)]
    progress(len(answers))
    if len(answers) < len(prompts):
        _rewrite(file, source, answers)
        num_kept = len(answers)
        llm = LLM(
            settings.target,
            revision=settings.revision,
            device=settings.device,
            dtype=settings.dtype,
            skip_tokenizer_init=True,
        )
        for start in range(len(answers), len(prompts), _AT_ONCE):
            part = prompts[start : start + _AT_ONCE]
            for answer in _answers(llm, part, start, settings, start - num_kept):
                append_line(file, json.dumps(answer))  # whatever ends this, what is known is kept
                answers.append(answer)
                progress(1)
    return [
        # What was asked is learned where it is the target's kind of text too: in texts.
        Document([*prompt, *answer], [not entry.messages] * len(prompt) + [True] * len(answer))
        for entry, prompt, answer in zip(entries, prompts, answers, strict=True)
    ]


def require_enough(
    entries: Sequence[Entry], settings: DataSettings, length: int, tokenizer: Tokenizer
) -> None:
    """Raise UsageError, before anything is generated, for what can never make two sequences."""
    most = 0
    for entry in entries:
        most += len(_prompt(entry, settings, length, tokenizer)) + settings.answers.tokens + 1
        if most > length:
            return
    raise UsageError(
        f"{counted(len(entries), 'prompt')} with answers make {most} tokens at most, which fit "
        f"into one sequence of {length}; give more prompts, or a smaller --max-length"
    )


def _prompt(entry: Entry, settings: DataSettings, length: int, tokenizer: Tokenizer) -> list[int]:
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
    llm: LLM, prompts: Sequence[list[int]], first: int, settings: DataSettings, first_id: int
) -> Iterator[list[int]]:
    """In order, each as soon as it and those before it are known.

    Args:
        first: place of the first prompt among all.
        first_id: that the engine will give it.
    """
    temperatures = settings.answers.temperatures
    params = [
        SamplingParams(
            temperature=temperatures[(first + place) % len(temperatures)],
            max_tokens=settings.answers.tokens,
            seed=settings.seed + first + place,
        )
        for place in range(len(prompts))
    ]
    given = [TokensPrompt(prompt_token_ids=ids) for ids in prompts]
    done: dict[int, list[int]] = {}
    for output in llm.stream(given, params):
        if output.finished:
            done[int(output.request_id)] = list(output.outputs[0].token_ids)
            while first_id in done:
                yield done.pop(first_id)
                first_id += 1


def _kept(file: Path, source: str) -> Iterator[list[int]]:
    """The answers of an interrupted run; a line that was cut short is left out."""
    if not file.is_file():
        return
    lines = iter(file.read_text("utf-8").splitlines())
    if next(lines, None) != _headline(source):
        return
    for line in lines:
        try:
            yield json.loads(line)
        except ValueError:
            return


def _rewrite(file: Path, source: str, answers: Sequence[list[int]]) -> None:
    lines = [_headline(source), *(json.dumps(answer) for answer in answers)]
    write_text(file, "".join(f"{line}\n" for line in lines))


def _headline(source: str) -> str:
    """The first line of a file of answers."""
    return json.dumps({"source": source})
