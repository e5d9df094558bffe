"""Where prompts come from."""

import os
from pathlib import Path

import pytest

from slipstream.cli.prompts import stdin_is_piped
from tests.cli.conftest import CommandLine
from tests.cli.fake_llm import FakeLLM


def test_texts_then_files_in_their_order(
    slipstream: CommandLine, fake_llm: type[FakeLLM], tmp_path: Path
) -> None:
    (tmp_path / "a").write_text("first\nfile\n\n")
    (tmp_path / "b").write_bytes("zweite Dätei\r\n".encode())
    files = ["--prompt-file", str(tmp_path / "a"), "--prompt_file", str(tmp_path / "b")]
    ran = slipstream("generate", *files, "--prompt", "one", "--prompt", "two")
    assert ran.code == 0
    assert fake_llm.made[-1].prompts == ["one", "two", "first\nfile\n", "zweite Dätei"]


@pytest.mark.parametrize("flags", [[], ["--prompt-file", "-"]])
def test_stdin(slipstream: CommandLine, fake_llm: type[FakeLLM], flags: list[str]) -> None:
    assert slipstream("generate", "some/model", *flags, stdin=b"piped in\n").code == 0
    assert fake_llm.made[-1].prompts == ["piped in"]


def test_a_byte_order_mark_is_no_part_of_a_prompt(
    slipstream: CommandLine, fake_llm: type[FakeLLM]
) -> None:
    for line, wanted in ((b"\xef\xbb\xbfx", "x"), (b"x\xef\xbb\xbf", "x\ufeff")):
        slipstream("generate", "some/model", stdin=line)
        assert fake_llm.made[-1].prompts == [wanted]
    ran = slipstream("generate", "some/model", stdin=b"\xef\xbb\xbfx\xff")
    assert "byte 4 (0xff)" in ran.err


def test_stdin_is_left_alone_when_a_prompt_is_given(
    slipstream: CommandLine, fake_llm: type[FakeLLM]
) -> None:
    slipstream("generate", "--prompt", "x", stdin=b"not this")
    assert fake_llm.made[-1].prompts == ["x"]


def test_the_demo_brings_its_own_prompt(slipstream: CommandLine, fake_llm: type[FakeLLM]) -> None:
    assert slipstream("generate").code == 0
    assert len(fake_llm.made[-1].prompts[0]) > 100


@pytest.mark.parametrize(
    ("data", "named"),
    [(b"ab\xffc", ["byte 2", "0xff", "UTF-8"]), (b"", ["empty"]), (b"\n", ["empty"])],
)
def test_files_that_are_no_prompt(
    slipstream: CommandLine,
    fake_llm: type[FakeLLM],
    tmp_path: Path,
    data: bytes,
    named: list[str],
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_bytes(data)
    from_file = slipstream("generate", "--prompt-file", str(file))
    from_stdin = slipstream("generate", stdin=data)
    for ran, name in ((from_file, str(file)), (from_stdin, "stdin")):
        assert ran.code == 2
        assert name in ran.err
        for word in named:
            assert word in ran.err
    assert fake_llm.made == []


def test_a_file_that_is_not_there(slipstream: CommandLine, tmp_path: Path) -> None:
    for path, why in ((tmp_path / "no", "No such file"), (tmp_path, "Is a directory")):
        ran = slipstream("generate", "--prompt-file", str(path))
        assert ran.code == 2
        assert str(path) in ran.err
        assert why in ran.err


def test_no_prompt_at_all(slipstream: CommandLine) -> None:
    ran = slipstream("generate", "some/model")
    assert ran.code == 2
    assert "--prompt" in ran.err


def test_a_null_device_is_no_pipe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    reader, writer = os.pipe()
    with (
        Path(os.devnull).open() as null,
        file.open() as regular,
        os.fdopen(reader) as pipe,
        os.fdopen(writer, "w"),
    ):
        for stream, piped in ((null, False), (regular, True), (pipe, True), (None, False)):
            monkeypatch.setattr("sys.stdin", stream)
            assert stdin_is_piped() is piped
