"""Targets in training: what a drafter learns from is what the engine serves."""

from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.core.errors import UsageError
from slipstream.models.catalogue import read_decoder_config
from slipstream.models.checkpoint import Checkpoint
from slipstream.models.gguf.blocks import Q4_1
from slipstream.train.run import run_training
from slipstream.train.vocabulary import DraftVocabulary
from tests.checkpoints import write_qwen3
from tests.drafters.oracles import Target
from tests.gguf_checkpoints import as_gguf
from tests.mixture_checkpoints import FAMILIES, with_packed_experts, write_mixture
from tests.models.small_cases import SMALL
from tests.models.test_gguf_tokenizer import byte_level
from tests.models.test_parity import oracle, oracle_logits, write_checkpoint
from tests.quantized_checkpoints import gptq, write_quantized, write_whole
from tests.train.small_runs import run_drafting, settings, teacher, write_own_words

WIDE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64}  # in blocks of 32
IDS = torch.randint(1, 96, (2, 24), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize(
    ("kind", "form"), [("eagle3", "gptq"), ("draft", "gptq"), ("mtp", "gptq"), ("mtp", "mxfp4")]
)
def test_a_quantised_target_teaches_what_its_numbers_mean(
    kind: str, form: str, own_words: Path, tmp_path: Path
) -> None:
    model, whole = tmp_path / "quantised", tmp_path / "whole"
    if form == "mxfp4":
        with_packed_experts(model, write_mixture(whole, "gpt_oss", **WIDE))
    else:
        write_whole(whole, model, write_quantized(model, gptq(), num_hidden_layers=3))
    ours, theirs = (teacher(str(path)).states(IDS, (1, 3)) for path in (model, whole))
    for found, expected in zip(
        (ours.hidden, *ours.streams), (theirs.hidden, *theirs.streams), strict=True
    ):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    run_training(settings(kind, str(model), own_words, tmp_path / "drafter", steps=2))
    plain, speculated, _ = run_drafting(str(model), tmp_path / "drafter", {})
    assert speculated == plain


@pytest.mark.parametrize("kind", ["p-eagle", "draft"])
def test_a_gguf_target_is_trained_for(kind: str, own_words: Path, tmp_path: Path) -> None:
    """In its own dtype; draft models get its tokenizer, and heads may have its embedding."""
    folder = write_qwen3(tmp_path / "target", **WIDE, vocab_size=512, num_hidden_layers=3)
    words = Checkpoint(byte_level(tmp_path / "words.gguf")).container.metadata
    words = {key.replace(".", "__"): value for key, value in words.items()}
    file = as_gguf(folder, tmp_path / "target.gguf", Q4_1, **words)
    run_training(settings(kind, str(file), own_words, tmp_path / "drafter", steps=2))
    entries = Checkpoint(tmp_path / "drafter").entries
    assert {it.dtype for it in entries.values()} == {torch.bfloat16}
    assert (tmp_path / "drafter" / "tokenizer.json").is_file() == (kind == "draft")
    plain, speculated, _ = run_drafting(str(file), tmp_path / "drafter", {})
    assert speculated == plain


@pytest.mark.parametrize("kind", [kind for kind in FAMILIES if kind != "glm4_moe_lite"])
def test_a_target_with_experts_is_the_one_of_transformers(kind: str, tmp_path: Path) -> None:
    """Sinks, windows, YaRN, partial rope, and every way of routing among them."""
    target = write_mixture(tmp_path, kind)
    count = read_decoder_config(Checkpoint(target)).num_layers
    found = teacher(str(target)).states(IDS, range(count + 1))
    for index, ids in enumerate(IDS.tolist()):
        streams, hidden, _ = Target(target)(ids)
        for ours, theirs in zip((*found.streams, found.hidden), (*streams, hidden), strict=True):
            torch.testing.assert_close(ours[index], theirs, atol=1e-4, rtol=0)


def test_a_target_teaches_its_scaled_logits(tmp_path: Path) -> None:
    case = next(case for case in SMALL if case.architecture == "Granite")
    target = teacher(str(write_checkpoint(case, tmp_path)))
    ids = IDS[0].tolist()
    vocabulary = DraftVocabulary(None, target.config.vocab_size)
    found = target.distribution(target.states(IDS[:1], ()).hidden[0], vocabulary)
    expected = oracle_logits(oracle(tmp_path), ids)
    torch.testing.assert_close(found.logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("kind", "family", "message"),
    [
        ("eagle3", "glm4_moe_lite", "other than attention over keys and values"),
        ("mtp", "granite", "no MTP module can be made like the layers of .*attention_multiplier"),
    ],
)
def test_layers_that_no_drafter_is_trained_for_are_refused_at_once(
    kind: str, family: str, message: str, own_words: Path, tmp_path: Path
) -> None:
    if family == "granite":
        case = next(case for case in SMALL if case.architecture == "Granite")
        target = write_checkpoint(case, tmp_path / "target")
    else:
        target = write_mixture(tmp_path / "target", family)
    with pytest.raises(UsageError, match=message):
        run_training(settings(kind, str(target), own_words, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A target with the vocabulary of the tests of training, and what it wrote."""
    folder = tmp_path_factory.mktemp("gpt_oss")
    target = str(write_mixture(folder / "target", "gpt_oss"))
    return target, write_own_words(target, folder / "own.safetensors")


STEPS = {"eagle3": 40, "p-eagle": 2, "dflash": 2, "medusa": 2, "mtp": 2, "draft": 2, "pard": 2}


@pytest.mark.parametrize(
    "kind",
    [
        *("eagle3", "dflash", "mtp", "draft"),
        *(pytest.param(it, marks=pytest.mark.full) for it in ("p-eagle", "medusa", "pard")),
    ],
)
def test_drafters_of_a_target_with_experts_are_dense(
    kind: str, gpt_oss: tuple[str, Path], tmp_path: Path
) -> None:
    """With more steps, some draft tokens would be accepted."""
    target, words = gpt_oss
    heads = {"norm_before_fc": True, "aux_layers": (0, 3, 4)}
    options = {"eagle3": heads, "p-eagle": heads, "pard": {"mask_token": 90}}.get(kind, {})
    given = settings(kind, target, words, tmp_path, steps=STEPS[kind], options=options)
    trained = run_training(given)
    assert not any(".experts." in name for name, _ in trained.recipe.trained.named())
    plain, speculated, length = run_drafting(target, tmp_path, {})
    assert speculated == plain
    assert length > (1.1 if STEPS[kind] > 2 else 0.9)
