"""Images in prompts as the host knows them: the keys of their blocks, and their positions."""

from collections.abc import Mapping
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from slipstream.cache.block_manager import BlockManager
from slipstream.core.spans import Span, position_offset
from slipstream.engine.images import TowerReader
from slipstream.models.vision.tower import ImageFamily, ImageTower, Placeholder, SpanEmbeddings
from slipstream.runner.rows import prompt_rows
from slipstream.runner.spans import rope_axes

SIZE, PLACEHOLDER = 4, 99
digests = st.binary(min_size=16, max_size=16)


@st.composite
def laid_out(draw: st.DrawFn) -> tuple[list[int], list[tuple[int, int, int]]]:
    """Token ids, and the start and grid of each image among them."""
    ids: list[int] = []
    places = []
    for _ in range(draw(st.integers(1, 3))):
        ids += [7] * draw(st.integers(0, 6))
        rows, columns = draw(st.integers(1, 4)), draw(st.integers(1, 4))
        places.append((len(ids), rows, columns))
        ids += [PLACEHOLDER] * (rows * columns)
    return [*ids, *[7] * draw(st.integers(1, 9))], places


def spans_of(places: list[tuple[int, int, int]], keys: list[bytes]) -> list[Span]:
    return [
        Span(start, rows * columns, key, (rows, columns), None)
        for (start, rows, columns), key in zip(places, keys, strict=True)
    ]


@given(laid_out(), st.data())
def test_another_image_of_the_same_size_shares_no_block_from_it_on(
    prompt: tuple[list[int], list[tuple[int, int, int]]], data: st.DataObject
) -> None:
    ids, places = prompt
    keys = [data.draw(digests) for _ in places]
    changed = data.draw(st.integers(0, len(places) - 1))
    others = [*keys]
    others[changed] = data.draw(digests.filter(lambda it: it != keys[changed]))
    blocks = BlockManager(64, SIZE, enable_prefix_caching=True)
    blocks.admit("a")
    blocks.grow("a", len(ids))
    # In chunks, which may cut an image.
    for done in sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=4))):
        blocks.index("a", "", ids, done, spans_of(places, keys))
    blocks.index("a", "", ids, len(ids), spans_of(places, keys))
    whole = (len(ids) - 1) // SIZE
    assert len(blocks.match_prefix("", ids, spans_of(places, keys))) == whole
    before = min(places[changed][0] // SIZE, whole)
    assert len(blocks.match_prefix("", ids, spans_of(places, others))) == before
    assert len(blocks.match_prefix("", ids)) == min(places[0][0] // SIZE, whole)


class Tower:
    """A tower whose grids and embeddings do not depend on options."""

    def grid(self, width: int, height: int, options: Mapping[str, Any]) -> tuple[int, int]:
        return 2, 3

    def encode(self, image: Image.Image, options: Mapping[str, Any]) -> SpanEmbeddings:
        return SpanEmbeddings(torch.zeros(6, 1), torch.zeros(0, 6, 1))


class Family(ImageFamily):
    """Has any option."""

    def __init__(self) -> None:
        self.placeholder = Placeholder(PLACEHOLDER, PLACEHOLDER)

    def require_options(self, options: Mapping[str, Any], max_tokens: int) -> None:
        pass

    def load(self, dtype: torch.dtype, device: torch.device) -> ImageTower:
        raise NotImplementedError


options_of_a_processor = st.dictionaries(
    st.sampled_from(["min_pixels", "max_pixels", "size"]),
    st.integers(0, 2) | st.dictionaries(st.sampled_from(["a", "b"]), st.integers(0, 2)),
)


@given(st.lists(st.tuples(st.integers(0, 1), options_of_a_processor), min_size=2, max_size=6))
def test_images_share_blocks_only_if_they_were_read_with_the_same_options(
    asked: list[tuple[int, dict[str, Any]]],
) -> None:
    """All have the same size, grid and text, and each comes after all before it."""
    pictures = [Image.new("RGB", (4, 6), color) for color in ("red", "blue")]
    reader = TowerReader(
        Tower(), Family(), None, 1, 100, {"max_pixels": 1}, 1 << 20, torch.device("cpu")
    )
    blocks = BlockManager(64, SIZE, enable_prefix_caching=True)
    earlier: list[tuple[int, dict[str, Any]]] = []
    for number, (picture, options) in enumerate(asked):
        ids, spans = reader.place([7, PLACEHOLDER, 7, 7], [pictures[picture]], options)
        whole = {"max_pixels": 1, **options}
        hits = len(blocks.match_prefix("", ids, spans))
        assert hits == (2 if (picture, whole) in earlier else 0)
        earlier.append((picture, whole))
        blocks.admit(str(number))
        blocks.grow(str(number), len(ids))
        blocks.index(str(number), "", ids, len(ids), spans)
    assert reader.num_encoded == sum(it not in earlier[:place] for place, it in enumerate(earlier))


@given(laid_out(), st.data())
def test_an_image_that_is_shifted_within_its_placeholders_is_another(
    prompt: tuple[list[int], list[tuple[int, int, int]]], data: st.DataObject
) -> None:
    key = data.draw(digests)
    ids = [PLACEHOLDER] * 12
    blocks = BlockManager(64, SIZE, enable_prefix_caching=True)
    blocks.admit("a")
    blocks.grow("a", 12)
    blocks.index("a", "", ids, 12, [Span(0, 6, key, (2, 3), None)])
    assert not blocks.match_prefix("", ids, [Span(1, 6, key, (2, 3), None)])


def reference_axes(length: int, spans: list[Span]) -> list[tuple[int, int, int]]:
    """The positions, computed token by token as in transformers."""
    axes: list[tuple[int, int, int]] = []
    position = 0
    for span in [*spans, Span(length, 0, b"", (0, 0), None)]:
        while len(axes) < span.start:
            axes.append((position, position, position))
            position += 1
        for row in range(span.grid[0]):
            axes += [(position, position + row, position + it) for it in range(span.grid[1])]
        position += max(span.grid)
    return axes


@given(laid_out(), st.data())
def test_positions_of_any_rows_are_those_of_the_whole(
    prompt: tuple[list[int], list[tuple[int, int, int]]], data: st.DataObject
) -> None:
    ids, places = prompt
    spans = spans_of(places, [b""] * len(places))
    expected = reference_axes(len(ids), spans)
    first = data.draw(st.integers(0, len(ids) - 1))
    end = data.draw(st.integers(first + 1, len(ids)))
    found = rope_axes(spans, first, end).T.tolist()
    assert [tuple(it) for it in found] == expected[first:end]
    assert expected[-1][0] == len(ids) - 1 + position_offset(spans)


def test_rows_behind_all_images_have_nothing_to_do_with_them() -> None:
    spans = spans_of([(3, 2, 2)], [b""])
    assert prompt_rows(spans, 7, 9) is None
    assert prompt_rows((), 0, 9) is None
    found = prompt_rows(spans, 2, 5)
    assert found is not None
    assert found.pieces == [(spans[0], 3, 5)]
