"""The prompts of a benchmark, from the usual data sets or drawn at random."""

import gzip
import importlib
import json
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from slipstream.core.errors import UsageError


@dataclass(frozen=True)
class Row:
    """One entry of a file.

    Attributes:
        place: its file and line for error messages, such as `questions.jsonl, line 3`.
    """

    content: Mapping[str, Any]
    place: str

    def text(self, key: str) -> str:
        """The non-empty text of a key; raises UsageError for anything else."""
        value = self.content.get(key)
        if not isinstance(value, str) or not value:
            raise UsageError(f'{self.place} has no "{key}" (a text)')
        return value

    def listed(self, *keys: str) -> list[Any]:
        """The first non-empty list of these keys; raises UsageError if there is none."""
        for key in keys:
            value = self.content.get(key)
            if isinstance(value, list) and value:
                return value
        raise UsageError(f'{self.place} has no "{keys[0]}" (a list)')


def read_rows(file: Path) -> list[Row]:
    """Read all entries of a `.jsonl`, `.json` (both also with `.gz`) or `.parquet` file; UsageError
    if there are none, or it cannot be read."""
    if file.suffix == ".parquet":
        rows = list(_parquet(file))
    else:
        text = _text(file)
        rows = list(_document(file, text) if text.lstrip().startswith("[") else _lines(file, text))
    if not rows:
        raise UsageError(f"{file} holds no prompts")
    return rows


def _text(file: Path) -> str:
    try:
        data = file.read_bytes()
        if file.suffix == ".gz":
            data = gzip.decompress(data)
        return data.decode("utf-8-sig")
    except OSError as error:
        raise UsageError(f"cannot read the prompts in {file}: {error.strerror or error}") from None
    except (EOFError, UnicodeDecodeError, zlib.error) as error:
        raise UsageError(f"cannot read the prompts in {file}: {error}") from None


def _lines(file: Path, text: str) -> Iterator[Row]:
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            place = f"{file}, line {number}"
            try:
                entry = json.loads(line)
            except ValueError as error:
                raise UsageError(f"{place} is not JSON: {error}") from None
            yield _row(entry, place)


def _document(file: Path, text: str) -> Iterator[Row]:
    try:
        entries = json.loads(text)
    except ValueError as error:
        raise UsageError(f"{file} is not JSON: {error}") from None
    for number, entry in enumerate(entries, start=1):
        yield _row(entry, f"{file}, entry {number}")


def _parquet(file: Path) -> Iterator[Row]:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise UsageError(
            f"reading {file} needs pyarrow: pip install 'slipstream[bench]', or export it as JSON "
            "lines"
        ) from None
    try:
        entries = parquet.read_table(file).to_pylist()
    except (OSError, ValueError) as error:  # pyarrow's own errors are ValueErrors
        raise UsageError(f"cannot read the prompts in {file}: {error}") from None
    for number, entry in enumerate(entries, start=1):
        yield _row(entry, f"{file}, row {number}")


def _row(entry: Any, place: str) -> Row:
    if not isinstance(entry, dict):
        raise UsageError(f"{place} is not an object")
    return Row(entry, place)


Message = Mapping[str, Any]

DEMO, CUSTOM, RANDOM = "demo", "custom", "random"
_LEAST, _LONGEST = 4, 1024  # tokens: bounds for conversations of ShareGPT
HELD_OUT = Path(__file__).parents[1] / "demo" / "prompts" / "held_out.jsonl"


class TextEncoder(Protocol):
    """The part of a tokenizer that data sets use."""

    @property
    def vocab_size(self) -> int:
        """All ids are below this."""

    @property
    def special_token_ids(self) -> Collection[int]:
        """Ids of special tokens, which are never drawn."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids."""


@dataclass(frozen=True, kw_only=True)
class BenchPrompt:
    """A text to continue, messages to answer, or token ids to continue.

    Attributes:
        max_tokens: output tokens, where the data set gives them.
        later_turns: the user's next messages in the conversation.
        turn: number within the conversation, from 1.
    """

    id: str
    text: str | None = None
    messages: tuple[Message, ...] | None = None
    token_ids: tuple[int, ...] | None = None
    category: str | None = None
    max_tokens: int | None = None
    later_turns: tuple[str, ...] = ()
    turn: int = 1

    def after(self, answer: str) -> "BenchPrompt | None":
        """The next turn of a chat, given this answer; None after the last."""
        if not self.later_turns:
            return None
        said, *later = self.later_turns
        turn = self.turn + 1
        return replace(
            self,
            id=f"{self.id.removesuffix(f'/{self.turn}')}/{turn}",
            messages=(
                *(self.messages or ()),
                {"role": "assistant", "content": answer},
                {"role": "user", "content": said},
            ),
            later_turns=tuple(later),
            turn=turn,
        )

    def shown(self) -> Any:
        if self.text is not None:
            return self.text
        return list(self.messages if self.messages is not None else self.token_ids or ())


@dataclass(frozen=True, kw_only=True)
class RandomShape:
    """The lengths of random prompts, which vary by a share of up to `spread` (0 to 1).

    Attributes:
        prefix: number of tokens that all prompts begin with, in addition to their own.
        vocabulary: ids are below this; None takes the tokenizer's.
    """

    input_tokens: int = 128
    output_tokens: int = 128
    spread: float = 0.0
    prefix: int = 0
    vocabulary: int | None = None


def read_custom(row: Row) -> BenchPrompt:
    """Read `{"prompt": text}` or `{"messages": [...]}`, optionally with `id` and `max_tokens`."""
    content = row.content
    given: dict[str, Any] = {"id": str(content.get("id", "")), "category": _category(row)}
    most = content.get("max_tokens", content.get("output_tokens"))
    if most is not None:
        if not isinstance(most, int) or isinstance(most, bool) or most < 1:
            raise UsageError(f"{row.place}: max_tokens must be an integer from 1 on, not {most!r}")
        given["max_tokens"] = most
    if isinstance(content.get("prompt"), str):
        return BenchPrompt(text=content["prompt"], **given)
    messages = content.get("messages")
    if isinstance(messages, list) and messages:
        return BenchPrompt(messages=tuple(messages), **given)
    raise UsageError(f'{row.place} has neither "prompt" (a text) nor "messages" (a list)')


def read_question(row: Row) -> BenchPrompt:
    """Read a question of MT-Bench or Spec-Bench."""
    turns = row.listed("turns", "prompt")
    if not isinstance(turns[0], str) or not turns[0]:
        raise UsageError(f"{row.place}: the first turn is not a text")
    if not all(isinstance(turn, str) and turn for turn in turns):
        raise UsageError(f"{row.place}: a later turn is not a text")
    name = row.content.get("question_id", row.content.get("prompt_id", ""))
    return BenchPrompt(
        id=str(name),
        messages=_user_message(turns[0]),
        category=_category(row),
        later_turns=tuple(turns[1:]),
    )


def read_humaneval(row: Row) -> BenchPrompt:
    return BenchPrompt(id=str(row.content.get("task_id", "")), text=row.text("prompt"))


def read_instructcoder(row: Row) -> BenchPrompt:
    """Read a change of code to make (likaixin/InstructCoder): the code, then what to do with it."""
    code = row.content.get("input")
    if code is not None and not isinstance(code, str):
        raise UsageError(f'{row.place}: "input" is not a text')
    asked = f"{row.text('instruction')}\n\nAnswer with the whole code and nothing else."
    return BenchPrompt(
        id=str(row.content.get("id", "")),
        messages=_user_message(f"{code}\n\n{asked}" if code else asked),
    )


def read_sharegpt(row: Row) -> BenchPrompt | None:
    """Read the user's first message; None for a conversation without an answer."""
    turns = row.listed("conversations", "conversation")
    said = [turn.get("value") for turn in turns if isinstance(turn, dict)]
    if len(said) < 2 or not isinstance(said[0], str) or not said[0]:
        return None
    # With a tokenizer, `_with_length` adds the length of the recorded answer.
    return BenchPrompt(id=str(row.content.get("id", "")), messages=_user_message(said[0]))


_READERS: dict[str, Callable[[Row], BenchPrompt | None]] = {
    CUSTOM: read_custom,
    "mt-bench": read_question,
    "spec-bench": read_question,
    "humaneval": read_humaneval,
    "instructcoder": read_instructcoder,
    "sharegpt": read_sharegpt,
}
DATASETS = (DEMO, *_READERS, RANDOM)


def read_dataset(
    name: str, file: Path | None, category: str | None = None, encoder: TextEncoder | None = None
) -> list[BenchPrompt]:
    """Read all prompts of a data set.

    Args:
        name: one of DATASETS except `random`; `demo` needs no file.
        category: keep only prompts of this category; None keeps all.
        encoder: for ShareGPT, sets output lengths as in the recorded answers, and leaves out
            very short and very long conversations, as other benchmarks do.

    Raises:
        UsageError: there is no such file, or it is not of this kind.
    """
    if name == DEMO:
        name, file = CUSTOM, HELD_OUT
    if file is None:
        raise UsageError(f"the data set {name} is not bundled; name its file with --dataset-path")
    prompts: list[BenchPrompt] = []
    seen: set[str] = set()
    for number, row in enumerate(read_rows(file)):
        prompt = _READERS[name](row)
        if prompt is None:
            continue
        if name == "sharegpt" and encoder is not None:
            prompt = _with_length(prompt, row, encoder)
            if prompt is None:
                continue
        if prompt.id in seen or not prompt.id:  # answers are compared by id
            prompt = replace(prompt, id=f"{prompt.id}@{number}" if prompt.id else str(number))
        seen.add(prompt.id)
        prompts.append(prompt)
    return _of_category(prompts, category, file)


def draw_random(
    count: int, shape: RandomShape, seed: int, encoder: TextEncoder | None, as_text: bool
) -> list[BenchPrompt]:
    """Draw prompts of random tokens; their acceptance says nothing about real texts.

    Args:
        as_text: decode them to chats, whose lengths in tokens are only close to those asked for.

    Raises:
        UsageError: the vocabulary is unknown, or has special tokens only.
    """
    import numpy

    if encoder is None and (as_text or shape.vocabulary is None):
        raise UsageError(
            "random prompts are drawn from a vocabulary; name the model's directory with "
            "--tokenizer, or (for completions) give --random-vocab-size"
        )
    source = numpy.random.default_rng(seed)
    special = frozenset[int]() if encoder is None else frozenset(encoder.special_token_ids)
    size = shape.vocabulary or (encoder.vocab_size if encoder is not None else 0)
    ids = numpy.array([token for token in range(size) if token not in special])
    if not len(ids):
        raise UsageError(
            f"the first {size} token ids are all special ones; raise --random-vocab-size"
        )

    def length(named: int) -> int:
        low, high = named * (1 - shape.spread), named * (1 + shape.spread)
        return max(1, int(source.integers(int(low), int(high) + 1)))

    prefix = source.choice(ids, shape.prefix)
    prompts = []
    for number in range(count):
        drawn = [*prefix, *source.choice(ids, length(shape.input_tokens))]
        tokens = tuple(int(token) for token in drawn)
        prompt = BenchPrompt(
            id=f"random-{number}", token_ids=tokens, max_tokens=length(shape.output_tokens)
        )
        if as_text and encoder is not None:
            prompt = replace(prompt, token_ids=None, messages=_user_message(encoder.decode(tokens)))
        prompts.append(prompt)
    return prompts


def take(prompts: Sequence[BenchPrompt], count: int | None) -> list[BenchPrompt]:
    """Take `count` prompts (None: all), spread evenly; repeat them if there are fewer."""
    if count is None:
        return list(prompts)
    if count <= len(prompts):
        return [prompts[index * len(prompts) // count] for index in range(count)]
    taken = []
    for index in range(count):
        again, place = divmod(index, len(prompts))
        prompt = prompts[place]
        taken.append(replace(prompt, id=f"{prompt.id}#{again + 1}") if again else prompt)
    return taken


def _with_length(prompt: BenchPrompt, row: Row, encoder: TextEncoder) -> BenchPrompt | None:
    """Add the length of the recorded answer; None for conversations that are left out."""
    question, answer = (
        len(encoder.encode(str(turn.get("value", "")), add_special_tokens=False))
        for turn in row.listed("conversations", "conversation")[:2]
    )
    if min(question, answer) < _LEAST or question > _LONGEST or question + answer > 2 * _LONGEST:
        return None
    return replace(prompt, max_tokens=answer)


def _of_category(prompts: list[BenchPrompt], category: str | None, file: Path) -> list[BenchPrompt]:
    if not prompts:
        raise UsageError(f"{file} holds no usable prompts")
    if category is None:
        return prompts
    kept = [prompt for prompt in prompts if prompt.category == category]
    if not kept:
        known = sorted({prompt.category for prompt in prompts if prompt.category is not None})
        hint = f"there are {', '.join(known)}" if known else "its prompts have none"
        raise UsageError(f"{file} has no prompts of the category {category}; {hint}")
    return kept


def _user_message(text: str) -> tuple[Message, ...]:
    return ({"role": "user", "content": text},)


def _category(row: Row) -> str | None:
    value = row.content.get("category", row.content.get("kind"))
    return value if isinstance(value, str) else None
