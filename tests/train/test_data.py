"""Texts, chats and prompts to sequences; features on disk; what cannot be read."""

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import LLM
from slipstream.core.errors import GenerationError, UsageError
from slipstream.core.outputs import RequestOutput
from slipstream.models.tokenizer import Tokenizer
from slipstream.train.batches import numbered_generator
from slipstream.train.features import DiskFeatures, count_that_fits
from slipstream.train.plan import WORK
from slipstream.train.run import run_training
from slipstream.train.sequences import Document, Sequences, encode, pack
from slipstream.train.texts import read_entries
from slipstream.train.vocabulary import most_frequent
from tests.train.small_runs import prepared, settings, teacher

CHAT = [
    {"role": "user", "content": "w10 w11"},
    {"role": "assistant", "content": "w20"},
    {"role": "user", "content": "w12"},
    {"role": "assistant", "content": "w21 w22"},
]


def lines(file: Path, *values: Any) -> Path:
    file.write_text("".join(json.dumps(value) + "\n" for value in values))
    return file


def test_of_a_chat_the_assistant_is_learned(taught_target: str, tmp_path: Path) -> None:
    entries = read_entries([lines(tmp_path / "chats.jsonl", {"messages": CHAT})])
    (document,) = encode(entries, Tokenizer(Path(taught_target)))
    assert list(document.token_ids) == [1, 10, 11, 3, 2, 20, 3, 1, 12, 3, 2, 21, 22, 3]
    learned = [index for index, wanted in enumerate(document.learned) if wanted]
    assert learned == [5, 6, 11, 12, 13]


def test_documents_are_packed_into_one_length() -> None:
    documents = [Document([5, 6, 7], [True] * 3), Document([], []), Document([8, 9], [False] * 2)]
    packed = pack(documents, 4, separator=0)
    assert packed.token_ids.tolist() == [[5, 6, 7, 0], [8, 9, 0, 0]]
    assert packed.learned.tolist() == [[True] * 4, [False, False, True, False]]
    training, validation = packed.split(0.01, seed=0)
    assert (len(training), len(validation)) == (1, 1)
    with pytest.raises(UsageError, match="give more text"):
        training.split(0.5, seed=0)


def test_texts_are_read_from_files_and_folders(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "b.txt").write_text("w5 w6")
    lines(folder / "a.jsonl", {"text": "w7"}, {"prompt": "w8"})
    found = read_entries([folder])
    assert [(entry.text, entry.wants_answer) for entry in found] == [
        ("w7", False),
        ("w8", True),
        ("w5 w6", False),
    ]


def test_a_line_may_hold_line_separators_of_unicode(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    text = '{"text": "w1\u2028w2"}\r\n{"text": "w3"}\n'
    file.write_text(text, "utf-8-sig", newline="")  # and begin with a byte order mark
    assert [entry.text for entry in read_entries([file])] == ["w1\u2028w2", "w3"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "w1"}\n{"txt": 3}\n', "line 2 must be one of"),
        ("a.jsonl", b"{\n", "line 1 is not valid JSON"),
        ("a.txt", b"\xff\xfe", "is not text in UTF-8"),
        ("a.txt", b"  ", "there is no text in"),
    ],
)
def test_what_is_no_text_is_refused(
    name: str, content: bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=message):
        read_entries([tmp_path / name])
    with pytest.raises(UsageError, match="no file or directory"):
        read_entries([tmp_path / "missing"])


def test_the_target_answers_prompts_and_an_interrupted_run_asks_for_the_rest(
    taught_target: str, tmp_path: Path
) -> None:
    prompts = [{"prompt": "w5 w6 w7"}, {"messages": CHAT[:1]}, {"text": "w9 w8 w7 w6 w5"}]
    data = lines(tmp_path / "prompts.jsonl", *prompts)
    given = settings(
        "eagle3",
        taught_target,
        data,
        tmp_path,
        generate=True,
        generate_tokens=6,
        generate_prompt_tokens=2,
        temperatures=(0.0, 1.0),
        max_length=16,
    )
    answers = tmp_path / "answers.jsonl"
    first = prepared(given, tmp_path / "one.safetensors", answers)
    ids = first.token_ids.flatten().tolist()
    assert ids[:3] == [5, 6, 7]
    source, *kept = answers.read_text().splitlines()
    assert len(kept) == 3
    assert ids[3 : 3 + len(json.loads(kept[0]))] == json.loads(kept[0])
    answers.write_text("\n".join([source, kept[0], kept[1][:3]]))
    again = prepared(given, tmp_path / "two.safetensors", answers)
    assert again.digest == first.digest
    unanswered = settings("eagle3", taught_target, data, tmp_path, max_length=16)
    with pytest.raises(UsageError, match="--generate lets the target answer"):
        prepared(unanswered, tmp_path / "three.safetensors", answers)


def test_answers_are_kept_as_soon_as_they_are_known(
    taught_target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: LLM, *arguments: Any, **options: Any) -> Iterator[RequestOutput]:
        for output in stream(self, *arguments, **options):
            yield output
            if output.finished and output.request_id == "0":
                raise KeyboardInterrupt

    stream, answers = LLM.stream, tmp_path / "answers.jsonl"
    monkeypatch.setattr(LLM, "stream", interrupted)
    data = lines(tmp_path / "prompts.jsonl", *[{"prompt": f"w{n} w6"} for n in range(5, 9)])
    given = settings(
        "eagle3", taught_target, data, tmp_path, generate=True, generate_tokens=6, max_length=16
    )
    for number in (1, 2):
        with pytest.raises(KeyboardInterrupt):
            prepared(given, tmp_path / "one.safetensors", answers)
        assert len(answers.read_text().splitlines()) > number


def test_answers_end_in_time_and_more_time_continues(
    taught_target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = count()
    monkeypatch.setattr("slipstream.train.generation.time.monotonic", lambda: 60.0 * next(now))
    answers = tmp_path / "answers.jsonl"
    data = lines(tmp_path / "prompts.jsonl", *[{"prompt": f"w{n} w6"} for n in range(5, 15)])

    def make(minutes: float) -> Sequences:
        asked = {"generate_tokens": 6, "generate_minutes": minutes, "generate_batch": 2}
        given = settings(
            "eagle3", taught_target, data, tmp_path, generate=True, max_length=16, **asked
        )
        return prepared(given, tmp_path / "some.safetensors", answers)

    def kept() -> list[str]:
        return answers.read_text().splitlines()[1:]

    first = make(2.5)
    some = kept()
    assert 1 <= len(some) < 6
    assert first.token_ids.flatten()[:2].tolist() == [5, 6]
    second = make(30)
    assert len(second) > len(first)
    assert kept()[: len(some)] == some
    assert len(kept()) == 10
    other = lines(tmp_path / "others.jsonl", {"prompt": "w9 w8"}, {"prompt": "w9 w7"})
    asked = {"generate": True, "generate_minutes": 0.5, "max_length": 16}
    given = settings("eagle3", taught_target, other, tmp_path, **asked)
    monkeypatch.setattr(LLM, "stream", lambda *_, **__: iter(()))
    with pytest.raises(UsageError, match=r"no answer ended within --generate-minutes 0\.5"):
        prepared(given, tmp_path / "none.safetensors", answers)


def test_an_answer_that_ended_with_an_error_ends_the_run(
    taught_target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: LLM, *arguments: Any, **options: Any) -> Iterator[RequestOutput]:
        for output in stream(self, *arguments, **options):
            sample = replace(output.outputs[0], finish_reason="error", stop_reason="not finite")
            yield replace(output, outputs=[sample]) if output.finished else output

    stream, answers = LLM.stream, tmp_path / "answers.jsonl"
    monkeypatch.setattr(LLM, "stream", broken)
    data = lines(tmp_path / "prompts.jsonl", {"prompt": "w5 w6"}, {"prompt": "w7"})
    given = settings("eagle3", taught_target, data, tmp_path, generate=True, max_length=16)
    with pytest.raises(GenerationError, match="not finite"):
        prepared(given, tmp_path / "one.safetensors", answers)


def test_random_numbers_of_a_run_with_a_large_seed() -> None:
    assert numbered_generator(1 << 62, 3).initial_seed() != numbered_generator(7, 3).initial_seed()


def test_other_data_is_not_taken_for_that_of_an_earlier_run(
    taught_target: str, tmp_path: Path
) -> None:
    kept, answers = tmp_path / "kept.safetensors", tmp_path / "answers.jsonl"

    def make(prompt: str, **changes: Any) -> Sequences:
        data = lines(tmp_path / "prompts.jsonl", {"prompt": prompt})
        asked = {"generate": True, "generate_tokens": 6, "max_length": 16, **changes}
        given = settings("eagle3", taught_target, data, tmp_path, **asked)
        return prepared(given, kept, answers)

    first = make("w5 w6 w7")
    stamp = kept.stat().st_mtime_ns
    assert make("w5 w6 w7").digest == first.digest
    assert kept.stat().st_mtime_ns == stamp
    other = make("w9 w8")
    assert other.token_ids[0, :2].tolist() == [9, 8]
    assert make("w9 w8", generate_tokens=3).digest != other.digest
    assert make("w5 w6 w7").digest == first.digest
    kept.write_bytes(kept.read_bytes()[:-10])
    assert make("w5 w6 w7").digest == first.digest


def test_a_model_that_is_there_already_is_not_written_over(
    taught_target: str, own_words: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=r"holds a model already \(config\.json\)"):
        run_training(settings("medusa", taught_target, own_words, Path(taught_target)))
    assert not (Path(taught_target) / WORK).exists()
    (tmp_path / "README.md").write_text("mine")
    with pytest.raises(UsageError, match=r"holds a README\.md that no run has written"):
        run_training(settings("medusa", taught_target, own_words, tmp_path))
    assert (tmp_path / "README.md").read_text() == "mine"
    assert not (tmp_path / WORK).exists()
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="is a file; give a directory"):
        run_training(settings("medusa", taught_target, own_words, tmp_path / "file"))


def test_features_on_disk_teach_what_features_online_do(
    taught_target: str, own_words: Path, tmp_path: Path
) -> None:
    options = {"aux_layers": (1, 2, 3)}
    runs = [
        run_training(
            settings(
                "eagle3",
                taught_target,
                own_words,
                tmp_path / features,
                steps=4,
                features=features,
                options=options,
            )
        )
        for features in ("online", "disk")
    ]
    assert runs[0].acceptance == runs[1].acceptance
    ours, theirs = ((run.folder / "model.safetensors").read_bytes() for run in runs)
    assert ours == theirs
    assert list((tmp_path / "disk" / WORK / "features").glob("*.safetensors"))


def test_capturing_continues_after_the_last_whole_shard(
    taught_target: str, own_words: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.train.features._SHARD_BYTES", 100_000)
    target, sequences = teacher(taught_target), Sequences.load(own_words)
    captured: list[int] = []
    states = target.states

    def counted(ids: torch.Tensor, layers: Any) -> Any:
        captured.append(len(ids))
        return states(ids, layers)

    monkeypatch.setattr(target, "states", counted)

    def read(sequences: Sequences, *numbers: int) -> list[torch.Tensor]:
        done: list[int] = []
        captured.clear()
        features = DiskFeatures(tmp_path, sequences, target, (1, 2), 8, done.append)
        assert sum(done) == len(sequences)
        found = features.states(torch.tensor(numbers))
        return [found.hidden, *found.streams]

    whole = read(sequences, 0, 39)
    assert sum(captured) == len(sequences)
    files = sorted(tmp_path.glob("*"))
    assert len(files) > 3
    online = states(sequences.token_ids[[0, 39]].long(), (1, 2))
    for ours, theirs in zip(whole, (online.hidden, *online.streams), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    files[-1].unlink()
    files[1].write_bytes(files[1].read_bytes()[:-100])
    for ours, theirs in zip(read(sequences, 0, 39), whole, strict=True):
        assert torch.equal(ours, theirs)
    assert 0 < sum(captured) < len(sequences) / 2
    turned = sequences.at(torch.arange(39, -1, -1))
    torch.testing.assert_close(read(turned, 39, 0)[0], whole[0])
    assert sum(captured) == len(sequences)
    with pytest.raises(UsageError, match="has no room for one sequence"):
        count_that_fits(sequences, target, 2, 1e-6)
    assert count_that_fits(sequences, target, 2, 1e-3) == 36


def test_the_draft_vocabulary_is_the_commonest_tokens() -> None:
    ids = torch.tensor([[7, 7, 7, 2, 2, 9, 9, 4]], dtype=torch.int32)
    sequences = Sequences(ids, torch.ones_like(ids).bool())
    chosen = most_frequent(sequences, 3, 12, kept=(11,))
    assert chosen is not None
    assert chosen.tolist() == [2, 7, 11]
    assert most_frequent(sequences, 12, 12, ()) is None
