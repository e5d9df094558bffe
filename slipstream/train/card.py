"""The model card of a trained drafter."""

import json
from typing import Any

import torch

from slipstream import __version__
from slipstream.train.files import write_text
from slipstream.train.losses import ChainAcceptance
from slipstream.train.metrics import MetricsLog
from slipstream.train.recipe import Recipe

_CARD = """\
# {name}

A drafter of the kind `{kind}` for `{target}`{adapter}, {parameters:,} parameters, trained with
Slipstream {version} (torch {torch}).

It predicts the target's next tokens, and the target checks them: the drafter changes how fast the
target answers, and never what it answers. It cannot be used alone.

## Use

    slipstream generate {target} --drafter {out} -k {count}

or

    LLM({target!r}, speculative_config={config})

## Figures

On sequences that were held out of training ({drafts:,} drafts), simulated:

| | acceptance length |
| --- | --- |
| greedy | {greedy:.2f} |
| temperature 1 | {sampled:.2f} |

Accepted greedily up to position 1 to {count}: {rates}.

A simulated draft starts after every token of the text and is followed by the text's own tokens, so
the engine measures slightly different numbers. `metrics.jsonl` has the curves.

## How it was made

    {command}

Ended after {steps:,} steps of {tokens:,} tokens, {minutes:.1f} minutes of training. Settings:

```json
{settings}
```
"""


def write_card(
    recipe: Recipe[Any],
    command: str,
    acceptance: ChainAcceptance,
    metrics: MetricsLog,
    tokens_per_step: int,
) -> None:
    """README.md next to the weights."""
    settings, training = recipe.plan.settings, metrics.of_kind("training")
    count = recipe.num_draft_tokens
    config = {"method": recipe.METHOD, "model": str(settings.out), "num_speculative_tokens": count}
    values = {**vars(settings), "options": vars(settings.options)}
    text = _CARD.format(
        name=settings.out.name,
        kind=settings.kind,
        target=settings.target,
        adapter="" if settings.lora is None else f" with the adapter `{settings.lora}`",
        parameters=recipe.trained.num_parameters,
        version=__version__,
        torch=torch.__version__,
        out=settings.out,
        config=config,
        drafts=int(acceptance.drafts),
        greedy=acceptance.greedy_length,
        sampled=acceptance.sampled_length,
        count=count,
        rates=", ".join(f"{rate:.2f}" for rate in acceptance.rates()),
        command=command or "(called from Python)",
        steps=max(record["step"] for record in metrics.all()),
        tokens=tokens_per_step,
        minutes=(training[-1]["seconds"] if training else 0.0) / 60,
        settings=json.dumps(values, indent=2, default=str),
    )
    write_text(settings.out / "README.md", text)
