"""The model card, with its figures filled in from the evaluation."""

from __future__ import annotations

from typing import Any

_CARD = """\
# The demo family

Two small language models of Python source, made for showing and testing speculative decoding
without a download: a target of {target_parameters} parameters and a draft of {draft_parameters}
parameters with the same tokenizer, both of the Qwen3 architecture, both trained from scratch.

Four more drafters of the target stand beside them, each with a card of its own: an EAGLE-3 head
(`eagle3/`), an MTP module (`mtp/`), a P-EAGLE head (`p-eagle/`) and a PARD model that began as
the draft (`pard/`). `scripts/train_demo_drafters` trains them, and
`scripts.train_demo.bundle_drafters` puts them here.

## What they can do, and what they cannot

The target continues Python source with plausible lines and, asked in the chat template for a
function, answers with something of the right form. That is all. It has no knowledge of the
world, does not reason, does not converse, and speaks little but code; what it writes is often
wrong and, decoded greedily, often repeats itself. Do not use its output as code. The draft is
worth nothing alone: it is there to guess what the target will say.

Read the accepted lengths with that in mind. A text that repeats itself is easy to guess, so the
greedy column below is flattered; sampled text at temperature 1 hardly repeats. And a model that
knows one kind of text is easier to follow than a large one on text of many kinds: expect lower
figures there.

The target saw its text about {passes:.0f} times. It fits text it was trained on better than new
text ({train_nats:.2f} against {target_nats:.2f} nats per token) and may reproduce stretches of it
word for word.

## Figures

Measured with the weights as shipped (bf16 values, float32 arithmetic) on files and functions
that neither model was trained on. AL is the accepted length, 1 + accepted / rounds, with
{chain} draft tokens a round in a chain and at most {new} new tokens a prompt.

| held-out text | target | draft |
| --- | --- | --- |
| nats per token | {target_nats:.3f} | {draft_nats:.3f} |
| bits per byte | {target_bits:.3f} | {draft_bits:.3f} |
| nats per token, first half of a {window}-token window | {target_early:.3f} | {draft_early:.3f} |
| nats per token, second half | {target_late:.3f} | {draft_late:.3f} |

| held-out text | |
| --- | --- |
| same first choice | {agreement:.1%} of {tokens:,} positions |
| overlap of the distributions | {overlap:.1%} |

| AL, {chain} draft tokens | greedy | temperature 1 |
| --- | --- | --- |
{lengths}

{context_verdict}

## Text

{train_files:,} files ({train_megabytes:.0f} MB, {file_tokens:.1f} million tokens) of Python
source: the standard library of CPython {python} and {packages} packages installed beside it,
each with a permissive licence (MIT, BSD, Apache-2.0, PSF, ISC, zlib and the like) in its
metadata. Left out: packages with any other or no stated licence, vendored code, files that name
a copyleft licence, tests, generated files, tables, and near duplicates. {pairs:,} questions and
answers ({chat_tokens:.1f} million tokens) were made from documented functions of the same files.
Leading comment blocks with copyright notices were cut off before training.

{held_files} files, chosen by a hash of their names and then freed of files that share half of
their lines with training text, were held out. `prompts/held_out.jsonl` holds excerpts of
them, each with its package, licence and, where the file has one, copyright notice; they remain
under those licences. `manifest.json` lists every package with version and licence.

{package_table}

## How they were made

`python -m scripts.train_demo --out slipstream/demo --minutes-target {minutes_target:g} \
--minutes-draft {minutes_draft:g}`
on one {device} with torch {torch}: the target {target_steps:,} steps of {batch:,} tokens
({target_tokens:.0f} million tokens in all), the draft {draft_steps:,} steps against the
target's distributions, {own:.0%} of them on text the target wrote itself. The corpus is what is
installed on the machine, so another machine gives another family; step counts follow from the
minutes and can be fixed with `--steps-target` and `--steps-draft`. Hyperparameters, seeds and
file hashes are in `manifest.json`.
"""

_NAMES = {
    "shipped_prompts": "shipped prompts",
    "more_prompts": "more held-out prompts",
    "all": "all",
    "chat": "chat",
    "file": "file beginnings",
    "function": "function heads",
}


def _length_rows(figures: dict[str, Any]) -> str:
    """One table row for each prompt set and kind."""
    rows = []
    for key in ("shipped_prompts", "more_prompts"):
        greedy, sampled = figures[key]["greedy"], figures[key]["temperature_1"]
        for kind in greedy:
            rows.append(
                f"| {_NAMES[key]}, {_NAMES[kind]} ({greedy[kind]['texts']}) "
                f"| {greedy[kind]['accepted_length']:.2f} "
                f"| {sampled[kind]['accepted_length']:.2f} |"
            )
    return "\n".join(rows)


def _package_table(packages: dict[str, Any]) -> str:
    """The packages that gave most text."""
    largest = sorted(packages.items(), key=lambda item: -item[1]["bytes"])[:15]
    rows = [
        f"| {name} {entry['version']} | {entry['licence']} | {entry['bytes'] / 1e6:.1f} MB |"
        for name, entry in largest
    ]
    return "\n".join(["| largest packages | licence | text |", "| --- | --- | --- |", *rows])


def _context_verdict(first: float, second: float, context: int) -> str:
    """A statement on the declared context, from the loss by position."""
    if second <= first:
        return (
            f"The second half of the window is no worse than the first: the declared context of\n"
            f"{context} tokens holds. Nothing is known beyond it."
        )
    return f"The second half is worse than the first: do not count on all {context} tokens."


def model_card(manifest: dict[str, Any]) -> str:
    """The README for the models' folder."""
    figures, plan, corpus = manifest["figures"], manifest["plan"], manifest["corpus"]
    held, counts = figures["held_out"], corpus["counts"]
    half = plan["window"] // 2
    early, late = f"nats_at_positions_0_{half - 1}", f"nats_at_positions_{half}_{2 * half - 1}"
    batch = plan["batch_tokens"]
    target_tokens = manifest["steps"]["target"] * batch
    return _CARD.format(
        target_parameters=f"{manifest['parameters']['target']:,}",
        draft_parameters=f"{manifest['parameters']['draft']:,}",
        chain=plan["draft_tokens"],
        new=plan["evaluation_new_tokens"],
        window=plan["window"],
        context_verdict=_context_verdict(
            held["target"][early], held["target"][late], plan["target"]["context"]
        ),
        target_nats=held["target"]["nats_per_token"],
        draft_nats=held["draft"]["nats_per_token"],
        target_bits=held["target"]["bits_per_byte"],
        draft_bits=held["draft"]["bits_per_byte"],
        target_early=held["target"][early],
        draft_early=held["draft"][early],
        target_late=held["target"][late],
        draft_late=held["draft"][late],
        agreement=held["argmax_agreement"],
        overlap=held["distribution_overlap"],
        tokens=held["tokens"],
        lengths=_length_rows(figures),
        train_files=counts["train_files"],
        train_megabytes=counts["train_bytes"] / 1e6,
        file_tokens=counts["train_file_tokens"] / 1e6,
        python=corpus["train"]["packages"]["python"]["version"],
        packages=len(corpus["train"]["packages"]) - 1,
        pairs=counts["train_chat_pairs"],
        chat_tokens=counts["train_chat_tokens"] / 1e6,
        held_files=counts["held_out_files"],
        package_table=_package_table(corpus["train"]["packages"]),
        minutes_target=plan["minutes_target"],
        minutes_draft=plan["minutes_draft"],
        torch=manifest["torch"],
        device=manifest["device"],
        target_steps=manifest["steps"]["target"],
        draft_steps=manifest["steps"]["draft"],
        batch=batch,
        target_tokens=target_tokens / 1e6,
        passes=target_tokens / (counts["train_file_tokens"] + counts["train_chat_tokens"]),
        train_nats=manifest["last_training_loss"]["target"],
        own=plan["distill_own_share"],
    )
