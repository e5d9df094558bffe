"""Exit codes, and what goes to stderr."""

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.cli.errors import run
from slipstream.cli.main import app
from slipstream.core.errors import CheckpointError, RanksLostError
from slipstream.core.outputs import RequestOutput
from slipstream.core.sampling_params import SamplingParams
from tests.cli.conftest import CommandLine
from tests.cli.fake_llm import FakeLLM


def break_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(FakeLLM, "stream", fail)


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (CheckpointError("it is broken; mend it"), 1, "slipstream: it is broken; mend it\n"),
        (
            RuntimeError("boom"),
            1,
            "slipstream: internal error: RuntimeError: boom; run again with --debug for the "
            "traceback\n",
        ),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_errors_are_one_sentence_and_an_exit_code(
    slipstream: CommandLine,
    fake_llm: type[FakeLLM],
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    code: int,
    says: str,
) -> None:
    break_with(monkeypatch, error)
    ran = slipstream("generate", "--prompt", "x")
    assert (ran.code, ran.out, ran.err) == (code, "", says)


def test_run_is_called_chat_here(slipstream: CommandLine) -> None:
    ran = slipstream("run", "a model.gguf", "-v")
    says = "no such command: run; did you mean slipstream chat 'a model.gguf' -v?"
    assert (ran.code, ran.out, ran.err) == (2, "", f"slipstream: {says}\n")
    assert "No such command 'runs'" in slipstream("runs").err


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_an_error_starts_on_a_line_of_its_own(
    slipstream: CommandLine,
    fake_llm: type[FakeLLM],
    monkeypatch: pytest.MonkeyPatch,
    command: str,
) -> None:
    usual = FakeLLM._run

    def fail(llm: FakeLLM, prompts: list[str], params: SamplingParams) -> Iterator[RequestOutput]:
        outputs = usual(llm, prompts, params)
        yield next(outputs)
        raise RanksLostError("rank 1 of 2 is lost")

    monkeypatch.setattr(FakeLLM, "_run", fail)
    asked = {"stdin": b"x\n"} if command == "chat" else {}
    ran = slipstream(command, *([] if asked else ["--prompt", "x"]), **asked)
    assert (ran.code, ran.out, ran.err) == (1, "Hello\n", "slipstream: rank 1 of 2 is lost\n")


@pytest.mark.parametrize("command", ["generate", "generate --json", "chat"])
def test_an_output_that_was_broken_off_is_an_error(
    slipstream: CommandLine,
    fake_llm: type[FakeLLM],
    monkeypatch: pytest.MonkeyPatch,
    command: str,
) -> None:
    monkeypatch.setattr(FakeLLM, "reason", "error")
    asked = {"stdin": b"x\n"} if command == "chat" else {}
    given = [] if command == "chat" else ["--prompt", "x"]
    ran = slipstream(*command.split(), *given, **asked)
    assert ran.code == 1
    assert ran.err.endswith("slipstream: the output was broken off: it broke\n")
    assert "Second line" in ran.out


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("no room for 3 MB"),
        MemoryError(),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 4 bytes\nframe 0"),
    ],
)
def test_a_lack_of_memory_names_what_takes_less(
    slipstream: CommandLine,
    fake_llm: type[FakeLLM],
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
) -> None:
    break_with(monkeypatch, error)
    ran = slipstream("generate", "--prompt", "x")
    assert (ran.code, ran.err.count("\n")) == (1, 1)
    assert ran.err.startswith("slipstream: the system has too little memory: use a smaller cache")
    assert "frame" not in ran.err


@pytest.mark.parametrize(
    "line", [["--debug", "generate", "--prompt", "x"], ["generate", "--prompt", "x", "--debug"]]
)
def test_debug_shows_the_traceback(
    slipstream: CommandLine,
    fake_llm: type[FakeLLM],
    monkeypatch: pytest.MonkeyPatch,
    line: list[str],
) -> None:
    break_with(monkeypatch, RuntimeError("boom"))
    ran = slipstream(*line)
    assert ran.code == 1
    assert "Traceback (most recent call last)" in ran.err
    assert ran.err.endswith("internal error: RuntimeError: boom\n")


def test_debug_does_not_outlive_its_run(
    slipstream: CommandLine, fake_llm: type[FakeLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    break_with(monkeypatch, RuntimeError("boom"))
    slipstream("generate", "--prompt", "x", "--debug")
    assert "Traceback" not in slipstream("generate", "--prompt", "x").err


@pytest.mark.parametrize("name", ["eagle3", "p-eagle", "pard"])
def test_a_drafter_in_the_target_s_place_is_told_as_one(slipstream: CommandLine, name: str) -> None:
    ran = slipstream("generate", f"demo/{name}", "--prompt", "x")
    assert ran.code == 1
    assert f"is a drafter of the kind {name}, which goes with a target" in ran.err


def test_a_drafter_is_no_target_of_training(slipstream: CommandLine, tmp_path: Path) -> None:
    data, out = tmp_path / "a.txt", tmp_path / "out"
    data.write_text("text")
    line = ["eagle3", "demo/eagle3", "--data", str(data), "--out", str(out), "--steps", "1"]
    ran = slipstream("train", *line)
    assert ran.code == 1
    assert "is a drafter of the kind eagle3, which goes with a target" in ran.err


def test_ctrl_c_while_torch_is_imported_ends_the_command_quietly(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    # Shells let commands in the background ignore SIGINT.
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "import sys; sys.argv = ['slipstream', 'inspect', 'demo']; "
        "from slipstream.__main__ import main; main()"
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (130, "slipstream: interrupted\n")


def test_a_missing_model_directory(slipstream: CommandLine, tmp_path: Path) -> None:
    missing = str(tmp_path / "nowhere")
    for command in (["generate", missing, "--prompt", "x"], ["inspect", missing]):
        ran = slipstream(*command)
        assert ran.code == 1
        assert missing in ran.err
        assert "Traceback" not in ran.err


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ('{"method": "ngram", "typo": 1}', "unknown key typo"),
        ('{"method": "ngram", "num_speculative_tokens": -1}', "num_speculative_tokens"),
        ('{"method": "telepathy"}', "telepathy"),
        ("{}", "speculative_config needs method"),
        ('{"method": "ngram", "num_speculative_tokens": true}', "num_speculative_tokens"),
    ],
)
def test_speculative_config_is_read_strictly(
    slipstream: CommandLine, config: str, named: str
) -> None:
    ran = slipstream("generate", "demo", "--prompt", "x", "--speculative-config", config)
    assert ran.code == 2
    assert named in ran.err


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--prompt", "x", "-k", "-1"], "num_speculative_tokens"),
        (["--prompt", "x", "-k", "many"], "a number or auto"),
        (["--prompt", ""], "empty"),
        (["--prompt", "x y " * 100, "--max-model-len", "50"], "max_model_len"),
    ],
)
def test_what_cannot_be_generated_is_refused(
    slipstream: CommandLine, flags: list[str], named: str
) -> None:
    ran = slipstream("generate", *flags)
    assert (ran.code, ran.out) == (2, "")
    assert named in ran.err


def test_version_and_bare_command(slipstream: CommandLine) -> None:
    assert slipstream("--version").out == "slipstream 0.1.0\n"
    bare = slipstream()
    assert bare.code == 0
    assert "generate" in bare.out


def run_python(*arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, *arguments], input=stdin, capture_output=True, check=False, timeout=120
    )


def test_help_does_not_import_torch() -> None:
    code = (
        "import sys\n"
        "from slipstream.cli.errors import run\n"
        "from slipstream.cli.main import app\n"
        "for line in (['--help'], ['generate', '--help'], ['generate', '--oops'], ['--version']):\n"
        "    run(app, line)\n"
        "heavy = {'torch', 'numpy', 'tokenizers', 'jinja2'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr.decode()


def test_an_interrupt_while_modules_are_imported_is_one_line() -> None:
    code = (
        "import os, signal, sys\n"
        "class Interrupts:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name == 'slipstream.cli.main':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupts())\n"
        "from slipstream.__main__ import main\n"
        "main()\n"
    )
    done = run_python("-c", code)
    assert (done.returncode, done.stderr) == (130, b"slipstream: interrupted\n")
    pyproject = Path(__file__, "../../../pyproject.toml").resolve().read_text()
    assert 'slipstream = "slipstream.__main__:main"' in pyproject


def test_the_process_leaves_with_the_exit_code() -> None:
    done = run_python("-m", "slipstream", "generate", "--oops")
    assert done.returncode == 2
    assert done.stderr.decode().startswith("slipstream: no such flag: --oops")


def test_an_interrupted_process_says_nothing_more() -> None:
    line = [sys.executable, "-m", "slipstream", "generate", "--ignore-eos", "--max-tokens", "2000"]
    with subprocess.Popen(
        [*line, "--prompt", "import os"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)  # it has begun to write
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        errors = process.stderr.read().decode()
    assert process.returncode == 130
    assert errors == ""


def test_a_full_disk_behind_stdout_is_an_error() -> None:
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with Path("/dev/full").open("w") as full:
        ran = subprocess.run(
            [sys.executable, "-m", "slipstream", "--version"],
            stdout=full, stderr=subprocess.PIPE, env=buffered, text=True, check=False,
        )  # fmt: skip
    assert ran.returncode == 1
    assert "cannot read or write" in ran.stderr
    assert "free space where stdout is redirected to" in ran.stderr


@pytest.mark.parametrize(
    ("command", "code", "stderr"),
    [
        ("list --json", 0, "2>/dev/full"),
        ("generate --oops", 2, "2>&-"),
        pytest.param("list --json", 0, "2>&-", marks=pytest.mark.full),
        pytest.param("generate --oops", 2, "2>/dev/full", marks=pytest.mark.full),
    ],
)
def test_a_stderr_that_cannot_be_written_changes_nothing(
    command: str, code: int, stderr: str
) -> None:
    """`list` has a status line, as others have progress bars and notes."""
    told = run_python("-m", "slipstream", *command.split())
    line = f"exec {shlex.quote(sys.executable)} -m slipstream {command} {stderr}"
    ran = subprocess.run(["sh", "-c", line], stdout=subprocess.PIPE, check=False, timeout=120)
    assert (ran.returncode, ran.stdout) == (code, told.stdout)
    assert told.returncode == code


@pytest.mark.parametrize(
    ("command", "code", "says"),
    [
        ("generate --oops", 2, "no such flag: --oops"),
        ("generate --temperature -1", 2, "temperature must be 0"),
        ("generate", 1, "stdout is closed"),
        ("--version", 1, "stdout is closed"),
    ],
)
def test_a_closed_stdout_hides_no_wrong_flag(
    fake_llm: type[FakeLLM],
    capfd: pytest.CaptureFixture[str],
    command: str,
    code: int,
    says: str,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", None)
        assert run(app, command.split()) == code
    assert capfd.readouterr().err.startswith(f"slipstream: {says}")
    assert fake_llm.made == []


def test_a_closed_stdin_is_an_empty_one() -> None:
    line = f"exec {shlex.quote(sys.executable)} -m slipstream generate --prompt-file - <&-"
    ran = subprocess.run(["sh", "-c", line], capture_output=True, check=False, timeout=120)
    assert (ran.returncode, ran.stderr) == (2, b"slipstream: the prompt from stdin is empty\n")
