"""The model card of a trained drafter."""

import json
from typing import Any

import torch

from slipstream import __version__
from slipstream.train.files import write_text
from slipstream.train.losses import ChainAcceptance
from slipstream.train.records import Records
from slipstream.train.settings import TrainSettings

_CARD = """\
# {name}

A drafter of the kind `{kind}` for `{target}`, {parameters:,} parameters, trained with Slipstream
{version} (torch {torch}).

It guesses what the target says next; the target checks every guess, so it changes how fast the
target speaks and never what it says. It is of no use alone.

## Use

    slipstream generate {target} --drafter {out} -k {places}

or

    LLM({target!r}, speculative_config={config})

## Figures

On sequences that were held out of training ({drafts:,} drafts), simulated:

| | acceptance length |
| --- | --- |
| greedy | {greedy:.2f} |
| temperature 1 | {sampled:.2f} |

Accepted greedily at place 1 to {places}: {rates}.

A simulated draft begins behind every token of the text and is followed by the text's own words;
what the engine measures differs a little. `metrics.jsonl` has the curves.

## How it was made

    {command}

Ended behind {steps:,} steps of {tokens:,} tokens, {minutes:.1f} minutes of training. Settings:

```json
{settings}
```
"""


def write_card(
    settings: TrainSettings,
    method: dict[str, Any],
    command: str,
    num_parameters: int,
    acceptance: ChainAcceptance,
    records: Records,
    tokens_per_step: int,
) -> None:
    """README.md beside the weights."""
    told = records.all()
    training = [record for record in told if record["kind"] == "training"]
    steps = max(record["step"] for record in told)
    places = len(acceptance.greedy)
    config = {**method, "model": str(settings.out), "num_speculative_tokens": places}
    values = {**vars(settings), "options": vars(settings.options)}
    text = _CARD.format(
        name=settings.out.name,
        kind=settings.kind,
        target=settings.target,
        parameters=num_parameters,
        version=__version__,
        torch=torch.__version__,
        out=settings.out,
        config=config,
        drafts=int(acceptance.drafts),
        greedy=acceptance.greedy_length,
        sampled=acceptance.sampled_length,
        places=places,
        rates=", ".join(f"{rate:.2f}" for rate in acceptance.rates()),
        command=command or "(called from Python)",
        steps=steps,
        tokens=tokens_per_step,
        minutes=(training[-1]["seconds"] if training else 0.0) / 60,
        settings=json.dumps(values, indent=2, default=str),
    )
    write_text(settings.out / "README.md", text)
