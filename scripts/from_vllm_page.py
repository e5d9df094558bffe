"""Write docs/from_vllm.md: what each flag of `vllm serve` is here.

python -m scripts.from_vllm_page
"""

from collections import defaultdict
from pathlib import Path
from typing import Any

import typer

from slipstream.cli.main import app
from slipstream.cli.vllm_flags import ENTRIES, SHORT, NoEffect, Spelling, Unsupported

_ROOT = Path(__file__).parent.parent
PAGE = _ROOT / "docs" / "from_vllm.md"
_LINES = (_ROOT / "tests" / "cli" / "vllm_flag_names.txt").read_text("utf-8").splitlines()
_NAMES = dict.fromkeys(name for line in _LINES if line[:1] != "#" for name in line.split())
DECLARED = tuple(f"--{name}" for name in _NAMES if f"--{name}" not in ENTRIES)
"""vLLM's flags that `slipstream serve` has by the same name."""

INTRODUCTION = """\
# Coming from vLLM

Most command lines of `vllm serve` work here with the first word replaced:

```
vllm serve Qwen/Qwen3-8B --max-model-len 8192 --gpu-memory-utilization 0.9
slipstream serve Qwen/Qwen3-8B --max-model-len 8192 --gpu-memory-utilization 0.9
```

This page has every flag of `vllm serve` 0.26, and some of versions before. A flag is honoured, or
accepted because what it asks for is so, or refused with the reason; none is ignored. Requests are
explained in [protocol.md](protocol.md), metrics in [serving.md](serving.md#metrics)
(`--metrics-prefix vllm` gives them vLLM's names), drafters in [drafters.md](drafters.md).

- Underscores in flags count as hyphens, and every switch has its `--no-NAME`.
- Of a flag that takes JSON, single keys may be given: `--speculative-config.method ngram
  --speculative-config.num_speculative_tokens 4`.
- Flags that take several values take them one after the other (after MODEL), or may be repeated.
- `--config FILE.yaml` holds flags, one a line (`max-model-len: 8192`), and the model as `model:`.
  The command line counts before it.

What differs where nothing is given:

- The server listens on loopback alone; `--host 0.0.0.0` opens it to the network.
- Beyond 512 waiting requests new ones are refused with 429 (`--max-waiting`); a request that takes
  600 seconds ends with 504 (`--request-timeout`); a body has at most 4 MiB (`--max-body-bytes`).
- At the first signal to stop, running requests finish (`--drain-timeout`, or `--shutdown-timeout`).
- Tools and reasoning are told apart where the format is found from the checkpoint; no parser has to
  be named.
- A field of a request that is unknown is refused, not left out.
"""


def page() -> str:
    """The text of the page."""
    parts = [INTRODUCTION, _honoured(), _already(), _refused(), _short(), _rare()]
    return "\n".join(parts)


def serve_options() -> dict[str, Any]:
    """The options of `slipstream serve` by each of their spellings."""
    command: Any = typer.main.get_command(app)
    options = command.commands["serve"].params
    return {name: it for it in options for name in (*it.opts, *it.secondary_opts)}


def _honoured() -> str:
    options = serve_options()
    rows = {name: _told(name, options[name]) for name in DECLARED}
    spelled = {name: it.means for name, it in ENTRIES.items() if isinstance(it, Spelling)}
    return _table("Honoured", ("flag", "here"), rows | spelled)


def _told(name: str, option: Any) -> str:
    main = next(it for it in option.opts if it.startswith("--"))
    text: str = option.help
    if option.default not in (None, False, ()) and not text.endswith("]"):
        text = f"{text} [{str(option.default).lower() if option.is_flag else option.default}]"
    return text if name == main else f"`{main}`: {text}"


def _already() -> str:
    rows = {}
    for name, entry in ENTRIES.items():
        if isinstance(entry, NoEffect):
            values = [f"`{name} {value}`" for value in entry.values or ()]
            rows[", ".join(values) or name] = entry.why
    return _table("Accepted, because it is so", ("flag", "what is so"), rows) + (
        "\nOther values of these flags, and their `--no-NAME`, are refused with what stands here.\n"
    )


def _refused() -> str:
    by_reason = defaultdict(list)
    for name, entry in ENTRIES.items():
        if isinstance(entry, Unsupported):
            by_reason[entry.why].append(name)
    rows = [
        f"| {', '.join(f'`{name}`' for name in sorted(names))} | {_cell(why)} |"
        for why, names in by_reason.items()
    ]
    return "\n".join(
        ["## Refused", "", "| flags | why, and the nearest thing |", "|---|---|", *rows, ""]
    )


def _short() -> str:
    forms = ", ".join(f"`{short}` (`{name}`)" for short, name in SHORT.items())
    return (
        "## Short forms\n\n`-tp`, `-dp`, `-ep`, `-q`, `-O` (also `-O3`), `-cc` and `-sc` are "
        f"honoured. These mean flags of the tables above: {forms}.\n"
    )


def _rare() -> str:
    rows = {
        name: _told(name, it)
        for name, it in serve_options().items()
        if it.hidden and name.startswith("--") and not {*it.opts} & {*DECLARED}
    }
    return _table("Further flags that --help leaves out", ("flag", "here"), rows)


def _table(heading: str, columns: tuple[str, str], rows: dict[str, str]) -> str:
    lines = [f"## {heading}", "", f"| {columns[0]} | {columns[1]} |", "|---|---|"]
    for name in sorted(rows, key=lambda it: it.strip("`")):
        shown = name if name.startswith("`") else f"`{name}`"
        lines.append(f"| {shown} | {_cell(rows[name])} |")
    return "\n".join([*lines, ""])


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page())
