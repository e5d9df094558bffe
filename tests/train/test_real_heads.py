"""The scripts that train heads for a real model: prompts by category, and what is reported."""

import json
from pathlib import Path

import pytest

from scripts.real_heads.evaluate import summary
from scripts.real_heads.plan import HEADS
from scripts.real_heads.prompts import CATEGORIES, category, read_conversations, split
from scripts.real_heads.report import write_report
from slipstream.train.recipe import recipe_class
from slipstream.train.settings import TrainSettings


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Write a Python function that reverses a list", "code"),
        ("what does ```x = 1``` do", "code"),
        ("Write a poem about classes of birds", "writing"),
        ("Why is the sky blue", "questions"),
        ("The capital of France?", "questions"),
        ("Hello there, my friend", None),
    ],
)
def test_prompts_have_categories(text: str, expected: str | None) -> None:
    assert category(text) == expected


def test_whole_conversations_are_held_out(tmp_path: Path) -> None:
    """The file may be cut off; no prompt begins like another, and long ones are left out."""
    conversations = [
        {
            "id": f"c{number}_{part}",
            "conversations": [
                {"from": "human", "value": f"What is {number} and {part} of many?"},
                {"from": "gpt", "value": f"An answer {number}."},
                {"from": "human", "value": f"And why is that so, number {number}, {part}?"},
                {"from": "human", "value": "x" * 2000},
                {"from": "human", "value": "The same words every time."},
            ],
        }
        for number in range(400)
        for part in (0, 7)
    ]
    file = tmp_path / "chats.json"
    file.write_text(json.dumps(conversations)[:-40])
    found = list(read_conversations(file))
    assert found == conversations[:-1]
    training, held_out = split(found, 12)
    assert {it["category"] for it in held_out} == {"questions"}
    assert len(held_out) == 12 // len(CATEGORIES)
    texts = [it["messages"][-1]["content"] for it in (*training, *held_out)]
    assert len(set(texts)) == len(texts)
    names = {text.split()[2] for text in texts[-len(held_out) :]}
    assert not names & {it["messages"][0]["content"].split()[2] for it in training}
    assert {len(it["messages"]) for it in training} == {1, 3}
    assert max(map(len, texts)) < 100


def test_figures_and_curves_are_reported(tmp_path: Path) -> None:
    head, results = tmp_path / "heads" / "eagle3", tmp_path / "results"
    for folder in (head, results):
        folder.mkdir(parents=True)
    checks = {"acceptance_length": 1.5, "acceptance_length_sampled": 1.25}
    metrics = [
        {"step": 1, "kind": "training", "loss": 2.0, "seconds": 30.0},
        {"step": 1, "kind": "validation", **checks},
    ]
    (head / "metrics.jsonl").write_text("".join(f"{json.dumps(it)}\n" for it in metrics))
    row = {"category": "code", "tokens": 9, "ended": True, "drafts": 4, "accepted": 4}
    rows = [
        {**row, "per_position": [3, 1], "digest": "a"},
        {
            **row,
            "category": "writing",
            "drafts": 2,
            "accepted": 0,
            "per_position": [],
            "digest": "b",
        },
    ]
    (results / "eagle3.jsonl").write_text(json.dumps({"temperature": 0.0, "k": 4, "rows": rows}))
    changed = [rows[0], {**rows[1], "digest": "c"}]
    (results / "none.jsonl").write_text(json.dumps({"temperature": 0.0, "k": 4, "rows": changed}))
    facts = {"model": "m", "device": "d", "command": "c", "answers": 2, "tokens": 18}
    facts |= {"minutes": 1.5, "step_tokens": 16, "answer_tokens": 9}
    report = write_report(tmp_path, facts)
    found = next(it for it in report["measured"] if it["drafter"] == "eagle3")
    assert found["all"]["AL"] == round(1 + 4 / 6, 3)
    assert found["all"]["tokens_per_pass"] == round(16 / 12, 3)
    assert found["all"]["per_position"] == [0.5, round(1 / 6, 3)]
    assert (found["code"]["AL"], found["questions"]["prompts"]) == (2.0, 0)
    assert found["equal_to_plain"] == 1
    card = (tmp_path / "CARD.md").read_text()
    assert "| `eagle3` | 0 | 1.67 | 2.00 | 1.00 | 1.00 |" in card
    assert "| `eagle3` | - | 1 | 0.5 | 1.50 | 1.25 |" in card
    assert (tmp_path / "curves.png").stat().st_size > 1000
    assert "eagle3,1,30.0,2.0,," in (tmp_path / "curves.csv").read_text()
    assert summary([])["AL"] == 1


def test_every_head_has_a_recipe_that_takes_its_flags() -> None:
    """Known by their names: a flag that a kind does not read would end a run at its start."""
    fields = {name.replace("_", "-") for name in TrainSettings.__dataclass_fields__}
    for kind, words in HEADS.items():
        names = {word.removeprefix("--") for word in words if word.startswith("--")} - fields
        assert names <= {option.replace("_", "-") for option in recipe_class(kind).OPTIONS}
