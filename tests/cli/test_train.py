"""The command line of training."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from slipstream.train.settings import RECIPES, DrafterOptions, TrainSettings
from tests.cli.conftest import CommandLine


class NotTrainedError(Exception):
    """Ends the command where training would begin."""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[TrainSettings]:
    """The settings that a command line makes."""
    found: list[TrainSettings] = []

    def run_training(settings: TrainSettings, *_: Any) -> None:
        found.append(settings)
        raise NotTrainedError

    monkeypatch.setattr("slipstream.train.run.run_training", run_training)
    return found


def test_every_flag_arrives(slipstream: CommandLine, asked: list[TrainSettings]) -> None:
    line = (
        "train eagle3 somewhere --lora style --data a.txt --data b.jsonl --out head --revision r "
        "--generate --generate-tokens 7 --generate-prompt-tokens 8 --temperatures 0,0.5 "
        "--max-length 99 --validation 0.1 --steps 5 --minutes 2 --batch-size 3 --accumulate 4 "
        "--learning-rate 0.1 --warmup 0.2 --weight-decay 0.3 --clip 1 -k 6 --place_decay 0.9 "
        "--argmax-weight 0.4 --drop-rate 0.6 --features disk --max-feature-gb 2 "
        "--checkpoint-every 11 --validate-every 12 --log-every 13 --device cpu --dtype bf16 "
        "--seed 9 --draft-vocab-size 14 --share-head --share-embedding --aux-layers 1,2 "
        "--num-layers 1 --num-heads 2 --num-kv-heads 1 --head-dim 16 --intermediate-size 17 "
        "--hidden-size 18 "
        "--norm-before-fc --norm-before-residual --norm-output --mask-token 0 --init begun"
    )
    slipstream(*line.split())
    (settings,) = asked
    assert settings == TrainSettings(
        kind="eagle3",
        target="somewhere",
        lora=Path("style"),
        data=(Path("a.txt"), Path("b.jsonl")),
        out=Path("head"),
        revision="r",
        generate=True,
        generate_tokens=7,
        generate_prompt_tokens=8,
        temperatures=(0.0, 0.5),
        max_length=99,
        validation=0.1,
        steps=5,
        minutes=2.0,
        batch_size=3,
        accumulate=4,
        learning_rate=0.1,
        warmup=0.2,
        weight_decay=0.3,
        clip=1.0,
        num_speculative_tokens=6,
        place_decay=0.9,
        argmax_weight=0.4,
        drop_rate=0.6,
        features="disk",
        max_feature_gb=2.0,
        checkpoint_every=11,
        validate_every=12,
        log_every=13,
        device="cpu",
        dtype="bf16",
        seed=9,
        options=settings.options,
    )
    values = {field.name: getattr(settings.options, field.name) for field in fields(DrafterOptions)}
    assert None not in values.values()
    assert (settings.options.aux_layers, settings.options.mask_token) == ((1, 2), 0)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--steps 1 --aux-layers 1;2", "--aux-layers takes numbers with commas"),
        ("", "give --steps, --minutes, or both"),
        ("--steps 1 --validation 2", "--validation must be a number above 0 and below 1"),
        ("--steps 1 --features nowhere", "--features must be one of auto, online, disk"),
        ("--steps 1 --learning-rate nan", "--learning-rate must be a number above 0"),
        ("--steps 1 --learning-rate 0", "--learning-rate must be a number above 0"),
        ("--steps 1 --num-layers 0", "--num-layers must be an integer of at least 1"),
        ("--steps 1 --draft-vocab-size 0", "--draft-vocab-size must be an integer of at least 1"),
        ("--steps 1 --clip 0", "--clip must be a number above 0"),
        ("--steps 0", "--steps must be an integer of at least 1"),
        ("--steps 1 --device tpu", "--device must be one of auto, cpu, cuda"),
        ("--steps 1 --place-decay 0", "--place-decay must be a number above 0"),
        ("--steps 1 --weight-decay -1", "--weight-decay must be a number of at least 0"),
        ("--steps 1 --generate --temperatures -1", "--temperatures must be numbers from 0 up"),
        ("--steps 1 --generate-tokens 9", "says how the target answers; give --generate as well"),
        (f"--steps 1 --seed {1 << 63}", "--seed must be a signed 64-bit integer"),
        ("--steps 1 --features online --max-feature-gb 2", "leave --features online out"),
    ],
)
def test_wrong_flags_are_one_sentence(slipstream: CommandLine, flags: str, message: str) -> None:
    ran = slipstream("train", "eagle3", "demo", "--data", "x", "--out", "y", *flags.split())
    assert ran.code == 2
    assert message in ran.err
    assert ran.err.count("\n") == 1


def test_ctrl_c_tells_how_to_go_on(
    slipstream: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_training(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("slipstream.train.run.run_training", run_training)
    line = "train eagle3 demo --data a.txt --out head --steps 5"
    ran = slipstream(*line.split())
    assert ran.code == 130
    assert ran.err.splitlines()[-1] == (
        "slipstream: interrupted; run the same command again to continue from the last checkpoint"
    )


def test_the_kinds_are_told(slipstream: CommandLine) -> None:
    ran = slipstream("train", "--help")
    assert ran.code == 0
    for kind in (*RECIPES, "data"):
        assert kind in ran.out
    assert slipstream("train", "data", "demo", "--data", "x", "--out", "y.txt").code == 2
