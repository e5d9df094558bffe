"""Tokens are those that were recorded: rearranging code changes none (tests/token_digests.py)."""

import json

import pytest
import torch

from tests.tiny_models import TinyModels
from tests.token_digests import RECORDED, digest, recorded_cases, run

CASES = recorded_cases()
DIGESTS: dict[str, str] = json.loads(RECORDED.read_text())
FEW = list(CASES)[::19]
REST = [name for name in CASES if name not in FEW]
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="recorded on a CPU")


@pytest.mark.parametrize("name", FEW, ids=FEW)
def test_tokens_are_those_that_were_recorded(
    name: str, tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(name, tiny_models, monkeypatch)


@pytest.mark.full
@pytest.mark.parametrize("name", REST, ids=REST)
def test_tokens_are_those_that_were_recorded_in_every_case(
    name: str, tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(name, tiny_models, monkeypatch)


def check(name: str, tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    if "structured" in name:
        pytest.importorskip("llguidance")
    assert digest(run(CASES[name], tiny_models, monkeypatch)) == DIGESTS[name]


def test_every_case_is_recorded() -> None:
    assert list(DIGESTS) == list(CASES)
