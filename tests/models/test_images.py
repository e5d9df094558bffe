"""Prompts with images give the logits and greedy text of transformers' own processor and model."""

import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.utils import logging as transformers_logging

from slipstream import LLM, SamplingParams
from slipstream.core.errors import CheckpointError, UsageError
from slipstream.engine.images import TowerReader
from tests.image_checkpoints import (
    END,
    FAMILIES,
    IMAGE,
    IMAGE_END,
    MAX_POSITIONS,
    ROW_END,
    START,
    VOCAB_SIZE,
    Oracle,
    images,
    prompt,
    with_images,
    write,
    write_tokenizer_of,
)

COUNT = 32
GREEDY = SamplingParams(
    temperature=0,
    max_tokens=COUNT,
    ignore_eos=True,
    logprobs=VOCAB_SIZE,
    logit_bias={IMAGE: -100.0},  # as the oracle has it
)


@pytest.fixture(scope="module", autouse=True)
def _quiet() -> Iterator[None]:
    transformers_logging.disable_progress_bar()
    yield
    transformers_logging.enable_progress_bar()


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp(family), family)


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return make(folder)


@pytest.fixture(scope="module")
def sized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose images have as many tokens as they are large."""
    return write(tmp_path_factory.mktemp("sized"))


@pytest.fixture(scope="module")
def sized_llm(sized: Path) -> LLM:
    return make(sized)


def make(folder: Path, **options: Any) -> LLM:
    given: dict[str, Any] = {
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "block_size": 8,
        "num_kv_blocks": 200,
        "logprobs_mode": "raw_logits",
        **options,
    }
    return LLM(str(folder), **given)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_logits_and_text_are_those_of_transformers(
    count: int, folder: Path, family: str, llm: LLM
) -> None:
    given, ids = images(count), prompt(count)
    tokens, logits = Oracle(folder, family).generate(ids, given, COUNT)
    output = llm.generate(with_images(ids, given), GREEDY)[0].outputs[0]
    assert list(output.token_ids) == tokens
    assert output.logprobs is not None
    ours = torch.tensor([[row[it].logprob for it in range(VOCAB_SIZE)] for row in output.logprobs])
    # Gemma 4's random tower makes a thousand of a last bit, and on a GPU sums have another order.
    loose = torch.cuda.is_available() and family.startswith("Gemma4")
    assert (ours - logits).abs().max() < (2e-3 if loose else 1e-4)


def test_text_alone_is_read_as_ever(folder: Path, family: str, llm: LLM) -> None:
    ids = [1, 2, 3, 9, 11]
    output = llm.generate({"prompt_token_ids": ids}, GREEDY)[0].outputs[0]
    alone = make(folder, limit_mm_per_prompt={"image": 0})
    assert alone.generate({"prompt_token_ids": ids}, GREEDY)[0].outputs[0] == output
    with pytest.raises(UsageError, match="limit_mm_per_prompt"):
        alone.generate(with_images([1, IMAGE, 2], images(1)), GREEDY)


def truncated() -> Image.Image:
    """An image whose pixels are read when they are needed."""
    file = io.BytesIO()
    images(3)[2].save(file, "png")
    return Image.open(io.BytesIO(file.getvalue()[:-2000]))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (with_images([1, 2], images(1)), "0 placeholders"),
        (with_images([1, IMAGE, IMAGE, 2], images(1)), "2 placeholders"),
        ({"prompt_token_ids": [1, IMAGE, 2]}, "1 placeholders"),
        (with_images([1, IMAGE], images(1)), "ends with an image"),
        (with_images([1, *[IMAGE] * 17, 2], images(1) * 17), "at most 16"),
        (with_images([1, *[IMAGE] * 9, 2], images(3)[2:] * 9), "max_model_len"),
        ({"prompt_token_ids": [1, 2], "multi_modal_data": {"video": [1]}}, "video"),
        ({"prompt_token_ids": [1, 2], "multi_modal_data": {"image": "x.png"}}, "PIL"),
        ({"prompt_token_ids": [1, 2], "multi_modal_data": [1]}, "objects"),
        ({"prompt_token_ids": [1, 2], "multi_modal_data": {"image": np.ones((4, 4, 3))}}, "PIL"),
        (with_images([1, IMAGE, 2], [Image.new("RGB", (0, 9))]), "image of 0 x 9 pixels is empty"),
        (with_images([1, IMAGE, 2], [truncated()]), "an image cannot be read: .*truncated"),
    ],
)
def test_prompts_that_do_not_fit_their_images_are_refused(
    given: Any, said: str, sized_llm: LLM
) -> None:
    with pytest.raises(UsageError, match=said):
        sized_llm.generate(given, GREEDY)
    assert not sized_llm.engine.has_unfinished


def test_images_of_absurd_shapes_and_options_are_refused(sized_llm: LLM) -> None:
    thin = images(1)[0].resize((900, 2))
    with pytest.raises(UsageError, match="900 x 2 pixels"):
        sized_llm.generate(with_images([1, IMAGE, 2], [thin]), GREEDY)
    given: Any = {**with_images([1, IMAGE, 2], images(1)), "mm_processor_kwargs": {"sighs": 3}}
    with pytest.raises(UsageError, match="sighs"):
        sized_llm.generate(given, GREEDY)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"foo": 1}, "options of the image processor are size .*, not {'foo': 1}"),
        ({"size": 5}, "options of the image processor are size .*, not {'size': 5}"),
        ({"min_pixels": "9"}, "options of the image processor are"),
        ({"max_pixels": False}, "options of the image processor are"),
        ({"size": 0}, "options of the image processor are"),
        ({"max_pixels": 0}, "must be from 1 to longest_edge"),
        ({"min_pixels": -1}, "must be from 1 to longest_edge .*, but they are -1 and"),
        ({"min_pixels": 10**15}, "must be from 1 to longest_edge"),
        (
            {"min_pixels": 10**12, "max_pixels": 10**15},
            r"an image has \d+ tokens or more, but max_model_len is \d+; lower it",
        ),
    ],
    ids=str,
)
def test_wrong_options_of_the_processor_are_told_at_the_start(
    options: dict[str, Any], told: str, sized: Path
) -> None:
    with pytest.raises(UsageError, match=rf"^mm_processor_kwargs: .*{told}"):
        make(sized, mm_processor_kwargs=options)


def test_wrong_options_are_told_at_the_start_by_every_family(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"^mm_processor_kwargs: .*foo"):
        make(folder, mm_processor_kwargs={"foo": 1})


def test_options_of_the_processor_change_what_is_seen(sized: Path, sized_llm: LLM) -> None:
    size = {"size": {"shortest_edge": 64, "longest_edge": 512}}
    given: Any = with_images(prompt(1), images(1))
    whole = sized_llm.generate(given, GREEDY)[0]
    fewer: Any = {**given, "mm_processor_kwargs": size}
    smaller = sized_llm.generate(fewer, GREEDY)[0]
    assert len(smaller.prompt_token_ids) < len(whole.prompt_token_ids) <= MAX_POSITIONS
    always = make(sized, mm_processor_kwargs=size).generate(given, GREEDY)[0]
    others: list[dict[str, Any]] = [
        {"max_pixels": 4096, "min_pixels": 2048},
        {"size": {"longest_edge": 2048}},
    ]
    for own in others:  # which the prompt's precede, in whatever way the engine names them
        found = make(sized, mm_processor_kwargs=own).generate(fewer, GREEDY)[0]
        assert found.outputs[0].token_ids == smaller.outputs[0].token_ids
    assert always.outputs[0].token_ids == smaller.outputs[0].token_ids


def test_chats_take_options_of_the_processor(sized: Path, tmp_path: Path) -> None:
    shutil.copytree(sized, tmp_path / "model")
    llm = make(write_tokenizer_of(tmp_path / "model"), skip_tokenizer_init=False)
    part = {"type": "image_pil", "image_pil": images(1)[0]}
    messages = [{"role": "user", "content": [part, {"type": "text", "text": "w1"}]}]
    (whole,) = llm.chat(messages, GREEDY)
    options = {"min_pixels": 64, "max_pixels": 512}
    (smaller,) = llm.chat(messages, GREEDY, mm_processor_kwargs=options)
    assert len(smaller.prompt_token_ids) < len(whole.prompt_token_ids)
    *_, last = llm.stream_chat(messages, GREEDY, mm_processor_kwargs=options)
    assert last.prompt_token_ids == smaller.prompt_token_ids
    with pytest.raises(UsageError, match="sighs"):
        llm.chat(messages, GREEDY, mm_processor_kwargs={"sighs": 3})
    huge = {"min_pixels": 10**12, "max_pixels": 10**15}
    with pytest.raises(UsageError, match=r"mm_processor_kwargs: .* lower it"):
        llm.chat(messages, GREEDY, mm_processor_kwargs=huge)


def test_what_was_read_of_an_image_is_kept_within_its_memory(sized: Path) -> None:
    llm = make(sized, mm_processor_cache_gb=1e-5)  # about 10 KiB: one image
    reader, (one, other) = llm.engine.images, images(2)
    assert isinstance(reader, TowerReader)
    for image, encoded in ((one, 1), (one, 1), (other, 2), (one, 3)):
        llm.generate(with_images(prompt(1), [image]), GREEDY)
        assert reader.num_encoded == encoded


def test_a_tower_that_is_not_whole_is_refused(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    kinds = "visual", "vision_tower", "vision_embedder"
    name = next(name for name in weights if any(it in name for it in kinds))
    del weights[name]
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        make(tmp_path)


def test_what_stands_around_an_image_is_written_for_the_user(tmp_path: Path) -> None:
    folder = write_tokenizer_of(write(tmp_path, "Gemma3"))
    llm = make(folder, skip_tokenizer_init=False)
    spelled = llm.generate(with_images([1, START, IMAGE, END, 3], images(1)), GREEDY)[0]
    given: list[Any] = [{"prompt_token_ids": [1, START, 3]}, {"prompt": "w1 <start> w3"}]
    for written in given:
        whole: Any = {**written, "multi_modal_data": {"image": images(1)[0]}}
        seen = llm.generate(whole, GREEDY)[0]
        assert seen.prompt_token_ids == spelled.prompt_token_ids
        assert seen.outputs[0].token_ids == spelled.outputs[0].token_ids


def test_what_encloses_an_image_is_put_there_once(tmp_path: Path) -> None:
    folder = write_tokenizer_of(write(tmp_path, "Gemma4-E"))
    llm = make(folder, skip_tokenizer_init=False)
    one, two = images(2)
    spelled = [1, START, IMAGE, END, START, IMAGE, END, 3]
    whole = llm.generate(with_images(spelled, [one, two]), GREEDY)[0]
    given: list[Any] = [
        {"prompt_token_ids": [1, IMAGE, IMAGE, 3]},
        {"prompt_token_ids": [1, IMAGE, START, IMAGE, END, 3]},
        {"prompt": "w1 <image> <start> <image> <end> w3"},
    ]
    for written in given:
        prompted: Any = {**written, "multi_modal_data": {"image": [one, two]}}
        seen = llm.generate(prompted, GREEDY)[0]
        assert seen.prompt_token_ids == whole.prompt_token_ids
        assert seen.outputs[0].token_ids == whole.outputs[0].token_ids


def test_the_budget_of_an_image_is_an_option(tmp_path: Path) -> None:
    folder, given = write(tmp_path, "Gemma4"), with_images([1, IMAGE, 3], images(1))
    larger: Any = {**given, "mm_processor_kwargs": {"max_soft_tokens": 140}}
    llm = make(folder, max_num_batched_tokens=150, max_num_seqs=4)  # room for one of 72
    few = llm.generate(given, GREEDY)[0]
    with pytest.raises(UsageError, match=r"an image has 126 tokens.*room for 72"):
        llm.generate(larger, GREEDY)
    for options in ({"max_soft_tokens": 71}, {"max_soft_tokens": 0}, {"size": 3}):
        refused: Any = {**given, "mm_processor_kwargs": options}
        with pytest.raises(UsageError, match="max_soft_tokens, one of"):
            llm.generate(refused, GREEDY)
    with pytest.raises(UsageError, match=r"mm_processor_kwargs: .*max_soft_tokens, one of"):
        make(folder, mm_processor_kwargs={"max_soft_tokens": 71})
    with pytest.raises(UsageError, match="at least 285"):
        make(
            folder,
            max_num_batched_tokens=150,
            max_num_seqs=4,
            mm_processor_kwargs={"max_soft_tokens": 140},
        )
    more = make(folder, mm_processor_kwargs={"max_soft_tokens": 140}).generate(given, GREEDY)[0]
    assert len(few.prompt_token_ids) == 4 + 60
    assert len(more.prompt_token_ids) == 4 + 126


@pytest.mark.parametrize("family", ["Qwen2VL", "Qwen2_5_VL"])
def test_files_as_they_were_published_first(family: str, tmp_path: Path) -> None:
    """The language model's keys beside those of the tower, and shorter names of tensors."""
    from safetensors.torch import load_file, save_file

    given = with_images(prompt(2), images(2))
    folder = write(tmp_path, family)
    known = make(folder).generate(given, GREEDY)[0].outputs[0]
    config = json.loads((folder / "config.json").read_text())
    text = config.pop("text_config")
    parameters = text.pop("rope_parameters")
    scaling = {"type": "mrope", "mrope_section": parameters["mrope_section"]}
    flat = {**text, **config, "rope_scaling": scaling, "rope_theta": parameters["rope_theta"]}
    (folder / "config.json").write_text(json.dumps(flat))
    weights = load_file(folder / "model.safetensors")
    names = {
        name: name.replace("language_model.", "").replace("model.visual", "visual")
        for name in weights
    }
    save_file({names[name]: it for name, it in weights.items()}, folder / "model.safetensors")
    assert make(folder).generate(given, GREEDY)[0].outputs[0] == known


def test_the_number_of_tiles_is_an_option(tmp_path: Path) -> None:
    folder, given = write(tmp_path, "InternVL"), with_images([1, IMAGE, 3], images(1))
    llm = make(folder)
    whole = llm.generate(given, GREEDY)[0]
    assert whole.prompt_token_ids == [1, START, *[IMAGE] * 4 * (2 * 3 + 1), END, 3]
    long = with_images([1, IMAGE, 3], images(2)[1:])  # 20 x 90 pixels
    fewer: Any = {**long, "mm_processor_kwargs": {"max_patches": 2}}
    smaller = llm.generate(fewer, GREEDY)[0]
    assert smaller.prompt_token_ids == [1, START, *[IMAGE] * 4 * (2 + 1), END, 3]
    one = make(folder, mm_processor_kwargs={"max_patches": 1}).generate(given, GREEDY)[0]
    assert one.prompt_token_ids == [1, START, *[IMAGE] * 4, END, 3]
    for options in ({"max_patches": 0}, {"max_patches": 65}, {"size": 3}):
        refused: Any = {**given, "mm_processor_kwargs": options}
        with pytest.raises(UsageError, match="the option of the image processor is max_patches"):
            llm.generate(refused, GREEDY)


def test_rows_of_mistrals_images_end_with_the_tokens_that_the_tokenizer_has(
    tmp_path: Path,
) -> None:
    folder, given = write(tmp_path, "Mistral3"), with_images([1, IMAGE, 3], images(1))
    named = {"40": {"content": "[IMG_BREAK]"}, "41": {"content": "[IMG_END]"}}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": named}))
    whole = make(folder).generate(given, GREEDY)[0]
    assert whole.prompt_token_ids == [1, *([*[IMAGE] * 7, 40] * 5)[:-1], 41, 3]


def test_the_longer_side_of_an_image_is_an_option(tmp_path: Path) -> None:
    folder, given = write(tmp_path, "Mistral3"), with_images([1, IMAGE, 3], images(1))
    llm = make(folder)
    fewer: Any = {**given, "mm_processor_kwargs": {"size": {"longest_edge": 16}}}
    smaller = llm.generate(fewer, GREEDY)[0]
    assert smaller.prompt_token_ids == [1, IMAGE, IMAGE, ROW_END, IMAGE, IMAGE, IMAGE_END, 3]
    always = make(folder, mm_processor_kwargs={"size": {"longest_edge": 16}})
    assert always.generate(given, GREEDY)[0].outputs[0].token_ids == smaller.outputs[0].token_ids
    for options in ({"size": 3}, {"size": {"longest_edge": 0}}, {"size": {"height": 9}}):
        refused: Any = {**given, "mm_processor_kwargs": options}
        with pytest.raises(UsageError, match=r"the option of the image processor is size"):
            llm.generate(refused, GREEDY)
    thin = with_images([1, IMAGE, 3], [images(1)[0].resize((900, 2))])
    with pytest.raises(UsageError, match="900 x 2 pixels cannot be read: it is too thin"):
        llm.generate(thin, GREEDY)


def test_images_longer_than_a_window_are_refused_where_that_matters(tmp_path: Path) -> None:
    folder = write(tmp_path, "Gemma4Unified")
    with pytest.raises(UsageError, match=r"max_soft_tokens \(140\) .* sliding_window \(72\)"):
        make(folder, mm_processor_kwargs={"max_soft_tokens": 140})


def test_sounds_are_refused_where_a_part_that_hears_lies_beside(folder: Path, llm: LLM) -> None:
    for kind in ("audio", "video"):
        given: Any = {"prompt_token_ids": [1, 2], "multi_modal_data": {kind: [b"beep"]}}
        with pytest.raises(UsageError, match=rf"'{kind}'.*neither video nor audio"):
            llm.generate(given, GREEDY)


def test_images_that_are_read_whole_need_room_in_a_pass(tmp_path: Path) -> None:
    folder = write(tmp_path, "Gemma3")
    with pytest.raises(UsageError, match="at least 37"):
        make(folder, max_num_batched_tokens=36, max_num_seqs=4)


@pytest.mark.parametrize(
    "given",
    [
        {"limit_mm_per_prompt": {"image": 2}},
        {"mm_processor_kwargs": {"max_pixels": 100}},
        {"mm_processor_cache_gb": 2.0},
        {"allowed_local_media_path": "."},
        {"allowed_media_domains": ["example.org"]},
    ],
)
def test_options_of_images_are_refused_for_models_without_them(given: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"{next(iter(given))} cannot take effect: .*; leave out"):
        LLM("demo", **given)


def test_asking_for_no_images_is_no_error() -> None:
    LLM("demo", num_kv_blocks=64, limit_mm_per_prompt={"image": 0}, mm_processor_cache_gb=0)
