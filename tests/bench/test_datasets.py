"""Every data set of the field is read in the forms in which people have it."""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from slipstream.bench.datasets import (
    BenchPrompt,
    RandomShape,
    draw_random,
    read_dataset,
    take,
)
from slipstream.core.errors import UsageError


class Letters:
    """A tokenizer: a letter a token; the first two ids are special."""

    vocab_size = 50
    special_token_ids = frozenset({0, 1})

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(40 + token) for token in ids)


def asked(prompt: BenchPrompt) -> str:
    assert prompt.messages is not None
    return str(prompt.messages[0]["content"])


def lines(file: Path, *entries: dict[str, Any]) -> Path:
    data = "\n".join(map(json.dumps, entries)).encode()
    file.write_bytes(gzip.compress(data) if file.suffix == ".gz" else data)
    return file


QUESTIONS = [
    {"question_id": 81, "category": "writing", "turns": ["Write.", "Again."], "reference": []},
    {"question_id": 82, "category": "math", "turns": ["Count."]},
]


def test_the_bundled_prompts_are_texts_and_chats() -> None:
    prompts = read_dataset("demo", None)
    assert len(prompts) == 80
    assert {prompt.text is None for prompt in prompts} == {True, False}
    assert len({prompt.id for prompt in prompts}) == 80
    assert all(prompt.category == "chat" for prompt in read_dataset("demo", None, "chat"))


@pytest.mark.parametrize("name", ["mt-bench", "spec-bench"])
@pytest.mark.parametrize("file", ["question.jsonl", "q.jsonl.gz", "q.json", "q.parquet"])
def test_questions_give_their_first_turn(tmp_path: Path, name: str, file: str) -> None:
    path = tmp_path / file
    if path.suffix == ".parquet":
        pyarrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.Table.from_pylist(QUESTIONS), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(QUESTIONS))
    else:
        lines(path, *QUESTIONS)
    prompts = read_dataset(name, path)
    assert [(it.id, asked(it), it.category) for it in prompts] == [
        ("81", "Write.", "writing"), ("82", "Count.", "math"),
    ]  # fmt: skip
    assert [it.id for it in read_dataset(name, path, "math")] == ["82"]
    with pytest.raises(UsageError, match="no prompts of the category x; there are math, writing"):
        read_dataset(name, path, "x")


def test_the_hub_export_of_mt_bench_calls_its_turns_prompt(tmp_path: Path) -> None:
    file = lines(tmp_path / "m.jsonl", {"prompt": ["One.", "Two."], "prompt_id": 7})
    assert [(it.id, asked(it)) for it in read_dataset("mt-bench", file)] == [("7", "One.")]


def test_humaneval_is_continued(tmp_path: Path) -> None:
    entry = {"task_id": "HumanEval/0", "prompt": "def f(x):\n", "canonical_solution": " ..."}
    (prompt,) = read_dataset("humaneval", lines(tmp_path / "h.jsonl", entry))
    assert (prompt.id, prompt.text) == ("HumanEval/0", "def f(x):\n")


@pytest.mark.parametrize("file", ["i.jsonl", "i.json"])
def test_instructcoder_asks_for_a_change_of_code(tmp_path: Path, file: str) -> None:
    entries = [
        {"instruction": "Rename x to y.", "input": "x = 1", "output": "y = 1"},
        {"id": "b", "instruction": "Write a loop.", "input": "", "output": "for i in x: i"},
    ]
    path = tmp_path / file
    path.write_text(json.dumps(entries)) if path.suffix == ".json" else lines(path, *entries)
    first, second = read_dataset("instructcoder", path)
    assert (first.id, second.id) == ("0", "b")
    assert asked(first).startswith("x = 1\n\nRename x to y.\n")
    assert asked(second).startswith("Write a loop.\n")
    for prompt in (first, second):
        assert asked(prompt).endswith("code and nothing else.")
        assert "for i" not in asked(prompt)


def test_sharegpt_takes_what_was_asked_first_and_how_long_the_answer_was(tmp_path: Path) -> None:
    def said(name: str, question: str, *answers: str) -> dict[str, Any]:
        turns = [{"from": "human", "value": question}]
        turns += [{"from": "gpt", "value": answer} for answer in answers]
        return {"id": name, "conversations": turns}

    file = tmp_path / "s.json"
    entries = [
        *(said("a", "Hi there", "Hello!"), said("alone", "Hello?"), said("short", "Hi", "Hello!")),
        *(said("curt", "Hello?", "No."), said("long", "x" * 1025, "Hello!")),
        said("both", "x" * 1024, "y" * 1025),
    ]
    file.write_text(json.dumps(entries))
    (prompt,) = read_dataset("sharegpt", file, encoder=Letters())
    assert (prompt.id, asked(prompt), prompt.max_tokens) == ("a", "Hi there", 6)
    prompts = read_dataset("sharegpt", file)
    assert [it.id for it in prompts] == ["a", "short", "curt", "long", "both"]
    assert {it.max_tokens for it in prompts} == {None}


def test_every_prompt_has_an_id_of_its_own(tmp_path: Path) -> None:
    entries = [{"id": "a", "prompt": "x"}, {"prompt": "y"}, {"id": "a", "prompt": "z"}]
    prompts = read_dataset("custom", lines(tmp_path / "c.jsonl", *entries))
    assert [prompt.id for prompt in prompts] == ["a", "1", "a@2"]


def test_custom_prompts_say_how_long(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "Hi"}]
    file = lines(tmp_path / "c.jsonl", {"prompt": "a", "max_tokens": 5}, {"messages": chat})
    first, second = read_dataset("custom", file)
    assert (first.id, first.text, first.max_tokens) == ("0", "a", 5)
    assert (second.id, asked(second), second.max_tokens) == ("1", "Hi", None)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("custom", '{"prompt": 3}', 'line 1 has neither "prompt" (a text) nor "messages"'),
        ("custom", '{"prompt": "x", "max_tokens": 0}', "max_tokens must be an integer from 1 on"),
        ("custom", "[1]", "entry 1 is not an object"),
        ("custom", "", "holds no prompts"),
        ("custom", "{", "line 1 is not JSON"),
        ("mt-bench", '{"turns": []}', 'line 1 has no "turns" (a list)'),
        ("mt-bench", '{"turns": [3]}', "the first turn is not a text"),
        ("mt-bench", '{"turns": ["a", ""]}', "a later turn is not a text"),
        ("humaneval", '{"prompt": ""}', 'line 1 has no "prompt" (a text)'),
        ("instructcoder", '{"input": "x"}', 'line 1 has no "instruction" (a text)'),
        ("instructcoder", '{"instruction": "x", "input": 3}', '"input" is not a text'),
        ("sharegpt", '{"conversations": [{"value": "a"}]}', "no usable prompts"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, name: str, text: str, says: str) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(text)
    with pytest.raises(UsageError) as error:
        read_dataset(name, file)
    assert says in str(error.value)


def test_broken_parquet_and_missing_files_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "p.parquet").write_bytes(b"PAR1")
    for name in ("p.parquet", "nowhere.jsonl"):
        with pytest.raises(UsageError, match="cannot read the prompts"):
            read_dataset("custom", tmp_path / name)
    with pytest.raises(UsageError, match="name its file with --dataset-path"):
        read_dataset("mt-bench", None)


def test_damaged_gzip_is_refused(tmp_path: Path) -> None:
    data = gzip.compress(b"x" * 99)
    for broken in (b"zip", data[:20], data[:10] + b"\xff" + data[11:]):  # no block is of kind 3
        (tmp_path / "p.jsonl.gz").write_bytes(broken)
        with pytest.raises(UsageError, match="cannot read the prompts"):
            read_dataset("custom", tmp_path / "p.jsonl.gz")


def test_random_prompts_have_the_lengths_asked_and_are_drawn_by_seed() -> None:
    shape = RandomShape(input_tokens=10, output_tokens=20, spread=0.5, prefix=3)
    prompts = draw_random(40, shape, 7, Letters(), as_text=False)
    assert prompts == draw_random(40, shape, 7, Letters(), as_text=False)
    assert prompts != draw_random(40, shape, 8, Letters(), as_text=False)
    lengths = {len(prompt.token_ids or ()) for prompt in prompts}
    assert min(lengths) >= 8
    assert max(lengths) <= 18
    assert len(lengths) > 3
    assert all(10 <= (prompt.max_tokens or 0) <= 30 for prompt in prompts)
    assert len({(prompt.token_ids or ())[:3] for prompt in prompts}) == 1
    assert {token for prompt in prompts for token in prompt.token_ids or ()} <= set(range(2, 50))
    exact = draw_random(3, RandomShape(input_tokens=4), 0, Letters(), as_text=True)
    assert [len(asked(prompt)) for prompt in exact] == [4, 4, 4]
    blind = draw_random(2, RandomShape(input_tokens=4, vocabulary=9), 0, None, as_text=False)
    assert {token < 9 for prompt in blind for token in prompt.token_ids or ()} == {True}
    with pytest.raises(UsageError, match="name the model's directory with --tokenizer"):
        draw_random(1, RandomShape(), 0, None, as_text=False)
    with pytest.raises(UsageError, match="are all special ones; raise --random-vocab-size"):
        draw_random(1, RandomShape(vocabulary=2), 0, Letters(), as_text=False)


def test_prompts_are_spread_over_the_file_or_come_again() -> None:
    prompts = [BenchPrompt(id=str(number), text="x") for number in range(9)]
    assert [it.id for it in take(prompts, 3)] == ["0", "3", "6"]
    assert take(prompts, None) == prompts
    assert [it.id for it in take(prompts, 11)][8:] == ["8", "0#2", "1#2"]
