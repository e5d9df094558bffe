"""Batch preparation and suffix lookup in Triton and in C++ give the results of plain torch."""

import importlib
import importlib.util
import sys
from dataclasses import replace

import pytest
import torch

from slipstream.kernels.pass_inputs import PassInputs
from slipstream.kernels.preparation import PlacedRows, PreparationOps, RequestTables
from slipstream.kernels.reference.preparation import PREPARATION as REFERENCE
from slipstream.speculative.ngram.lookup import SuffixLookup, lookup_in_cpp, lookup_in_torch
from tests.kernels.device import DEVICE

CPU = torch.device("cpu")
NEEDED = {"triton": "triton", "cpu": "_slipstream_cpu"}
BACKENDS = [name for name, module in NEEDED.items() if importlib.util.find_spec(module)]
SLOTS, LENGTH, BLOCK = 7, 45, 8
PADDING = SLOTS - 1  # a slot without tokens


def ops_of(backend: str) -> PreparationOps:
    module = importlib.import_module(f"slipstream.kernels.{backend}.preparation")
    ops: PreparationOps = module.PREPARATION
    return ops


def lookup_of(backend: str) -> SuffixLookup:
    if backend == "cpu":
        return lookup_in_cpp
    from slipstream.speculative.ngram.triton_lookup import lookup_in_triton

    return lookup_in_triton


@pytest.fixture(params=BACKENDS, autouse=True)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name: str = request.param
    if name == "cpu":
        monkeypatch.setattr(sys.modules[__name__], "DEVICE", CPU)
    return name


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make_tables(seed: int = 0, windowed: bool = False) -> RequestTables:
    generator = seeded(seed)
    width = 12 if windowed else 6
    num_tokens = torch.tensor([5, 17, 44, 1, 30, 45, 0])
    return RequestTables(
        token_ids=torch.randint(0, 90, (SLOTS, LENGTH + 1), generator=generator).int().to(DEVICE),
        num_tokens=num_tokens.to(DEVICE),
        num_computed=(num_tokens - 1).clamp_min(0).to(DEVICE),
        block_tables=torch.randperm(SLOTS * width, generator=generator)
        .view(SLOTS, width)
        .int()
        .to(DEVICE),
        block_size=BLOCK,
        window_column=6 if windowed else 0,
    )


def copied(tables: RequestTables) -> RequestTables:
    return replace(
        tables,
        token_ids=tables.token_ids.clone(),
        num_tokens=tables.num_tokens.clone(),
        num_computed=tables.num_computed.clone(),
    )


def assert_same_inputs(ours: PassInputs, theirs: PassInputs) -> None:
    assert (ours.window_paging is None) == (theirs.window_paging is None)
    parts = ["rows", "paging"] + ["window_paging"] * (ours.window_paging is not None)
    for part in parts:
        for name, value in vars(getattr(ours, part)).items():
            other = getattr(getattr(theirs, part), name)
            same = torch.equal(value, other) if torch.is_tensor(value) else value == other
            assert same, name


def on_device(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, device=DEVICE)


def assert_same_tables(ours: RequestTables, theirs: RequestTables) -> None:
    # The last column takes what has no place: which of several such tokens wins means nothing.
    assert torch.equal(ours.token_ids[:, :-1], theirs.token_ids[:, :-1])
    assert torch.equal(ours.num_tokens, theirs.num_tokens)
    assert torch.equal(ours.num_computed, theirs.num_computed)


@pytest.mark.parametrize("most", [1, 2, 5, 9])
@pytest.mark.parametrize("slots", [(3,), (2, 0, 5, 1), (4, 1, PADDING, PADDING)])
@pytest.mark.parametrize("mask_token", [None, 0, 1, 151_670])
def test_rows_are_expanded_as_by_the_reference(
    most: int, slots: tuple[int, ...], mask_token: int | None, backend: str
) -> None:
    tables, where = make_tables(), on_device(*slots)
    starts = tables.num_computed[where]
    lengths = torch.arange(len(slots), device=DEVICE) % (most + 1)
    ours = ops_of(backend).expand_rows(tables, where, starts, lengths, most, mask_token)
    theirs = REFERENCE.expand_rows(tables, where, starts, lengths, most, mask_token)
    assert ours.token_ids.dtype == theirs.token_ids.dtype == torch.int32
    if mask_token is not None:  # all rows but the last known token's
        known = tables.num_tokens[where].repeat_interleave(most)
        assert ours.token_ids[ours.inputs.rows.positions >= known].eq(mask_token).all()
    assert torch.equal(ours.token_ids, theirs.token_ids)
    assert torch.equal(ours.first_row, theirs.first_row)
    assert torch.equal(ours.last_row, theirs.last_row)
    assert_same_inputs(ours.inputs, theirs.inputs)
    assert torch.equal(
        ours.inputs.paging.context_lens, torch.where(lengths > 0, starts + lengths, 0)
    )
    assert ours.inputs.rows.max_rows == most
    assert (ours.inputs.paging.slots >= 0).sum() == lengths.sum()  # padding writes nothing
    assert ours.inputs.rows.positions.max() < LENGTH


@pytest.mark.parametrize(
    ("slots", "lengths", "most"),
    [
        ((3,), (2,), 5),
        ((2, 0, 5, 1), (1, 4, 1, 2), 4),
        ((2, 0, 5, 1, 3, 4), (9, 1, 3, 9, 1, 2), 9),
        ((4, 1, PADDING, PADDING), (1, 3, 0, 0), 3),
        ((PADDING, PADDING, PADDING), (0, 0, 0), 2),
    ],
)
@pytest.mark.parametrize(("mask_token", "windowed"), [(None, True), (7, False)])
def test_rows_are_packed_as_by_the_reference(
    slots: tuple[int, ...],
    lengths: tuple[int, ...],
    most: int,
    mask_token: int | None,
    windowed: bool,
    backend: str,
) -> None:
    tables, where = make_tables(windowed=windowed), on_device(*slots)
    counts = on_device(*lengths)
    starts = torch.minimum(tables.num_computed[where], LENGTH - counts)
    given = tables, where, starts, counts, most, mask_token
    needed = sum(lengths)
    for num_rows in range(max(1, needed), len(slots) * most, max(1, most - 2)):
        ours = ops_of(backend).expand_rows(*given, num_rows)
        theirs = REFERENCE.expand_rows(*given, num_rows)
        for name in ("token_ids", "request", "offset", "first_row", "last_row"):
            assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
        assert_same_inputs(ours.inputs, theirs.inputs)
        assert_packed(ours, counts, most, num_rows)
        # The rows that mean something are those of the padded layout.
        padded = REFERENCE.expand_rows(*given)
        assert ours.request is not None
        assert ours.offset is not None
        place = ours.request * most + ours.offset
        assert torch.equal(ours.token_ids, padded.token_ids[place])
        assert torch.equal(ours.inputs.rows.positions, padded.inputs.rows.positions[place])
        assert torch.equal(ours.inputs.paging.slots, padded.inputs.paging.slots[place])


def assert_packed(rows: PlacedRows, lengths: torch.Tensor, most: int, num_rows: int) -> None:
    """Each request has its rows, which are adjacent, and all rows belong to a request."""
    starts = rows.inputs.rows.query_start
    assert (int(starts[0]), int(starts[-1]), len(rows.token_ids)) == (0, num_rows, num_rows)
    own = starts.diff()
    assert ((own >= lengths) & (own <= most)).all()
    assert rows.inputs.rows.max_rows == most
    assert rows.request is not None
    assert torch.equal(rows.request.bincount(minlength=len(lengths)), own)
    assert ((rows.first_row == starts[:-1]) | (own == 0)).all()
    assert torch.equal(rows.last_row, rows.first_row + (lengths - 1).clamp_min(0))
    assert int(rows.last_row.max()) < num_rows
    assert (rows.inputs.paging.slots >= 0).sum() == lengths.sum()  # what is left writes nothing


@pytest.mark.parametrize(
    ("slots", "lengths"), [((3,), (4,)), ((2, 0, 5, 1), (9, 0, 1, 3)), ((0, 4, 1), (0, 2, 0))]
)
@pytest.mark.parametrize("rereads", [False, True])
@pytest.mark.parametrize("mask_token", [None, 0, 151_670])
def test_rows_are_placed_as_by_the_reference(
    slots: tuple[int, ...],
    lengths: tuple[int, ...],
    rereads: bool,
    mask_token: int | None,
    backend: str,
) -> None:
    tables, where = make_tables(), on_device(*slots)
    counts = on_device(*lengths)
    starts = torch.minimum((tables.num_tokens[where] - 3).clamp_min(0), LENGTH - counts)
    again = (counts > 0).long() if rereads else None
    ours = ops_of(backend).place_rows(tables, where, starts, counts, again, mask_token)
    theirs = REFERENCE.place_rows(tables, where, starts, counts, again, mask_token)
    assert ours.row_starts == theirs.row_starts
    assert ours.row_starts[-1] == sum(lengths)
    for name in ("token_ids", "request", "offset", "first_row", "last_row"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
    assert ours.token_ids.dtype == theirs.token_ids.dtype == torch.int32
    assert_same_inputs(ours.inputs, theirs.inputs)
    assert ours.inputs.rows.max_rows == max(lengths)
    assert int((ours.inputs.paging.slots < 0).sum()) == sum(map(bool, lengths)) * rereads


@pytest.mark.parametrize("slots", [(3,), (2, 0, 5, 1), (4, 1, PADDING, PADDING)])
def test_layers_with_a_window_find_rows_by_a_second_table(
    slots: tuple[int, ...], backend: str
) -> None:
    tables, where = make_tables(windowed=True), on_device(*slots)
    starts = tables.num_computed[where]
    lengths = torch.arange(len(slots), device=DEVICE) % 3
    again = (lengths > 0).long()
    ours = ops_of(backend).expand_rows(tables, where, starts, lengths, 2)
    assert_same_inputs(ours.inputs, REFERENCE.expand_rows(tables, where, starts, lengths, 2).inputs)
    starts = (starts - 2).clamp_min(0)
    placed = ops_of(backend).place_rows(tables, where, starts, lengths, again)
    expected = REFERENCE.place_rows(tables, where, starts, lengths, again)
    assert_same_inputs(placed.inputs, expected.inputs)
    # As if the second table were the only one.
    alone = replace(tables, block_tables=tables.block_tables[:, 6:].contiguous(), window_column=0)
    only = REFERENCE.place_rows(alone, where, starts, lengths, again).inputs
    assert_same_inputs(replace(placed.inputs.within_window(4), window_paging=None), only)
    assert placed.inputs.within_window(None) is placed.inputs


def test_numbers_of_requests_may_have_gaps(backend: str) -> None:
    """The gaps have other requests' numbers."""
    tables = make_tables()
    slots, lengths = on_device(2, 0, 5, 1, 3, 4), on_device(3, 1, 0, 2, 1, 3)
    starts = tables.num_computed[slots]
    for step in (2, 3):
        spread = slots[::step], starts[::step], lengths[::step]
        ours = ops_of(backend).expand_rows(tables, *spread, 3)
        theirs = REFERENCE.expand_rows(tables, *(it.contiguous() for it in spread), 3)
        assert torch.equal(ours.token_ids, theirs.token_ids)
        assert torch.equal(ours.inputs.paging.slots, theirs.inputs.paging.slots)
        both = []
        for ops, given in (
            (ops_of(backend), (slots[::step], lengths[::step])),
            (REFERENCE, (slots[::step].contiguous(), lengths[::step].contiguous())),
        ):
            own, tokens = copied(tables), on_device(*range(100, 109)).view(3, 3)
            ops.write_tokens(own, given[0], tokens[: len(given[0])], given[1])
            both.append(own)
        # Behind the known tokens what is not asked for may be written too.
        for slot, count in zip(slots[::step].tolist(), lengths[::step].tolist(), strict=True):
            known = int(tables.num_tokens[slot])
            kept = slice(known, min(known + count, LENGTH))
            assert torch.equal(both[0].token_ids[slot, kept], both[1].token_ids[slot, kept])


@pytest.mark.parametrize("index", [0, 2])
@pytest.mark.parametrize("reduced", [False, True])
def test_drafts_advance_as_by_the_reference(index: int, reduced: bool, backend: str) -> None:
    tables, where = make_tables(), on_device(2, 0, 5, 1)
    known, wanted = tables.num_tokens[where], on_device(3, 1, 0, 2)
    picked = on_device(3, 0, 4, 1)
    vocabulary = on_device(7, 11, 13, 50, 89) if reduced else None
    both = []
    for ops in (ops_of(backend), REFERENCE):
        own, tokens = copied(tables), torch.zeros((4, 3), dtype=torch.int64, device=DEVICE)
        starts, lengths = ops.advance_drafts(
            own, where, known, wanted, picked, vocabulary, tokens, index
        )
        both.append((own, tokens, starts, lengths))
    (ours, *our_numbers), (theirs, *their_numbers) = both
    assert_same_tables(ours, theirs)
    for one, other in zip(our_numbers, their_numbers, strict=True):
        assert torch.equal(one, other)
    assert not torch.equal(ours.token_ids, tables.token_ids)


@pytest.mark.parametrize(("requests", "width"), [(1, 1), (3, 7), (5, 4), (16, 7), (33, 12)])
def test_drafts_are_trimmed_as_by_the_reference(requests: int, width: int, backend: str) -> None:
    generator = seeded(requests)
    # In the order in which drafters write them; few values, so that many are equal.
    confidences = torch.randint(0, 9, (width, requests), generator=generator).T.float() / 8
    confidences[0, 0] = torch.nan
    wanted = torch.randint(0, width + 1, (requests,), generator=generator)
    factors = torch.randint(6, 13, (requests,), generator=generator)
    known = torch.randint(0, 2, (requests,), generator=generator)
    rates = torch.rand(16, generator=generator)
    given = [it.to(DEVICE) for it in (confidences, wanted, factors, rates, known)]
    all_rows = int(known.sum() + wanted.sum())
    totals = {all_rows, all_rows // 2, all_rows + 5, int(known.sum())}
    if requests > 16 and backend == "triton" and not torch.cuda.is_available():
        totals = {all_rows // 2}  # the interpreter takes seconds for each
    for num_rows in totals:
        ours = ops_of(backend).trim_drafts(*given, num_rows)
        assert torch.equal(ours, REFERENCE.trim_drafts(*given, num_rows))
        assert (ours <= given[1]).all()
        assert ours.sum() == min(int(wanted.sum()), num_rows - int(known.sum()))


def test_rows_go_to_the_tokens_that_survive_the_likeliest() -> None:
    confidences = torch.tensor([[0.5, 0.9, 0.9], [0.9, 0.5, 0.9], [0.2, 0.9, 0.9], [0.9, 0.9, 0.9]])
    rates = (torch.arange(16) + 0.5) / 16
    ones, wanted = torch.ones(4, dtype=torch.int64), torch.tensor([3, 3, 3, 2])
    given = confidences, wanted, 8 * ones, rates, ones
    kept = [REFERENCE.trim_drafts(*given, 4 + spare).tolist() for spare in (0, 1, 2, 3, 5, 12)]
    assert kept == [[0] * 4, [0, 1, 0, 0], [0, 1, 0, 1], [0, 1, 0, 2], [2, 1, 0, 2], [3, 3, 3, 2]]
    # A factor of two raises the third request's: 0.44 then is behind 0.53 and 0.48 alone.
    given = confidences, wanted, torch.tensor([8, 8, 16, 8]), rates, ones
    assert REFERENCE.trim_drafts(*given, 4 + 6).tolist() == [2, 2, 0, 2]


@pytest.mark.parametrize("width", [0, 1, 4])
def test_drafts_are_written_as_by_the_reference(width: int, backend: str) -> None:
    tables, where = make_tables(), on_device(4, 2, 0)
    tokens = torch.randint(100, 200, (3, width), generator=seeded(1)).to(DEVICE)
    counts = on_device(min(1, width), min(3, width), 0)
    ours, theirs = copied(tables), copied(tables)
    ops_of(backend).write_tokens(ours, where, tokens, counts)
    REFERENCE.write_tokens(theirs, where, tokens, counts)
    for request, (slot, count) in enumerate(zip(where.tolist(), counts.tolist(), strict=True)):
        known = int(tables.num_tokens[slot])
        legal = min(count, LENGTH - known)
        for own in (ours, theirs):
            # Behind what counts anything may stand.
            assert own.token_ids[slot, :known].equal(tables.token_ids[slot, :known])
            written = own.token_ids[slot, known : known + legal]
            assert written.tolist() == tokens[request, :legal].tolist()


def test_verdicts_are_committed_as_by_the_reference(backend: str) -> None:
    tables, where = make_tables(), on_device(4, 0, 3, 1, PADDING, PADDING)
    new = on_device(1, 1, 6, 1, 0, 0)
    at_end = on_device(1, 1, 0, 1, 0, 0) != 0
    tokens = torch.randint(100, 200, (6, 4), generator=seeded(2)).to(DEVICE)
    counts, accepted = on_device(4, 1, 2, 3, 1, 1), on_device(3, 0, 1, 2, 0, 0)
    both = []
    for ops in (ops_of(backend), REFERENCE):
        own = copied(tables)
        gains = ops.commit(own, where, new, at_end, tokens, counts, accepted)
        both.append((own, gains))
    (ours, our_gains), (theirs, their_gains) = both
    for slot in range(SLOTS):
        known = int(theirs.num_tokens[slot])
        assert ours.token_ids[slot, :known].equal(theirs.token_ids[slot, :known])
    assert torch.equal(ours.num_tokens, theirs.num_tokens)
    assert torch.equal(ours.num_computed, theirs.num_computed)
    assert our_gains[0].tolist() == their_gains[0].tolist() == [4, 1, 0, 3, 0, 0]
    assert our_gains[1].tolist() == their_gains[1].tolist() == [3, 0, 0, 2, 0, 0]
    assert ours.num_tokens.tolist() == [6, 20, 44, 1, 34, 45, 0]


@pytest.mark.parametrize(("shortest", "longest"), [(1, 1), (2, 3), (1, 5)])
@pytest.mark.parametrize("width", [1, 4, 7])
def test_suffixes_are_looked_up_as_by_the_reference(
    shortest: int, longest: int, width: int, backend: str
) -> None:
    generator = seeded(shortest + 10 * longest)
    token_ids = torch.randint(0, 4, (5, 1100), generator=generator).int().to(DEVICE)
    slots = on_device(3, 0, 4, 1, 2)
    known = on_device(1090, 1, 2, 37, 0)
    ours = lookup_of(backend)(token_ids, slots, known, width, shortest, longest)
    theirs = lookup_in_torch(token_ids, slots, known, width, shortest, longest)
    assert torch.equal(ours[1], theirs[1])
    assert ours[1][0]  # a long text of four letters has every short suffix
    assert torch.equal(ours[0][ours[1]], theirs[0][theirs[1]])


@pytest.mark.parametrize("length", [1, 2, 3, 64])
def test_texts_of_one_letter_repeat_themselves(length: int, backend: str) -> None:
    text = torch.full((1, 64), 7, dtype=torch.int32, device=DEVICE)
    given = text, on_device(0), on_device(length), 3, 1, 4
    ours, theirs = lookup_of(backend)(*given), lookup_in_torch(*given)
    assert ours[1].tolist() == theirs[1].tolist() == [length > 1]
    assert length == 1 or ours[0].tolist() == [[7, 7, 7]]


@pytest.mark.skipif("cpu" not in BACKENDS, reason="the C++ kernels are not built")
def test_places_that_do_not_exist_are_refused() -> None:
    """The C++ ops refuse the places that plain torch refuses."""
    tables = make_tables()
    ops, one = ops_of("cpu"), on_device(1).to(CPU)
    tables = replace(
        tables,
        **{
            name: getattr(tables, name).to(CPU)
            for name in ("token_ids", "num_tokens", "num_computed", "block_tables")
        },
    )
    for slot in (-1, SLOTS):
        with pytest.raises(ValueError, match="no such slot"):
            ops.expand_rows(tables, torch.tensor([slot]), one, one, 2)
        with pytest.raises(ValueError, match="no such slot"):
            lookup_in_cpp(tables.token_ids, torch.tensor([slot]), one, 2, 1, 2)
    with pytest.raises(ValueError, match="vocabulary"):
        ops.advance_drafts(tables, one, one, one, one + 7, one, one.view(1, 1).clone(), 0)


@pytest.mark.skipif("cpu" not in BACKENDS, reason="the C++ kernels are not built")
def test_tensors_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """C++ checks what it reads and writes, with and without `python -O`."""
    monkeypatch.setattr(sys.modules[__name__], "DEVICE", CPU)
    ops, tables, one = ops_of("cpu"), make_tables(), torch.tensor([1])
    tokens, path = one.view(1, 1).clone(), torch.zeros(1, 3, dtype=torch.int64)
    crossed = torch.zeros(3, 2, dtype=torch.int64).T
    pages = torch.zeros(2, SLOTS * 6, BLOCK, 1, 4)
    with pytest.raises(TypeError, match="starts: dtype int32, not int64"):
        ops.expand_rows(tables, one, one.int(), one, 2)
    with pytest.raises(ValueError, match=r"lengths: shape \[2\], not \[1\]"):
        ops.expand_rows(tables, one, one, torch.tensor([1, 1]), 2)
    with pytest.raises(TypeError, match="rereads: dtype float32"):
        ops.place_rows(tables, one, one, one, one.float())
    with pytest.raises(ValueError, match="index"):
        ops.advance_drafts(tables, one, one, one, one, None, tokens, 1)
    with pytest.raises(TypeError, match="tokens: dtype int32"):
        ops.advance_drafts(tables, one, one, one, one, None, tokens.int(), 0)
    with pytest.raises(ValueError, match="tokens: must be contiguous"):
        ops.advance_drafts(tables, *[torch.arange(2)] * 4, None, crossed, 0)
    with pytest.raises(ValueError, match=r"tokens: shape \[2, 1\], not \[1, 1\]"):
        ops.write_tokens(tables, one, torch.zeros(2, 1, dtype=torch.int64), one)
    with pytest.raises(TypeError, match="at_end: dtype int64, not bool"):
        ops.commit(tables, one, one, one, tokens, one, one)
    with pytest.raises(ValueError, match="pages: blocks of another size"):
        ops.keep_path(tables, one, one, path, one, pages[:, :, :4].contiguous())
    with pytest.raises(ValueError, match="pages: must be contiguous"):
        ops.keep_path(tables, one, one, path, one, pages[..., ::2])
    with pytest.raises(TypeError, match="token_ids: dtype int64, not int32"):
        lookup_in_cpp(tables.token_ids.long(), one, one, 2, 1, 2)
    with pytest.raises(TypeError, match="num_tokens: dtype int32"):
        ops.expand_rows(replace(tables, num_tokens=tables.num_tokens.int()), one, one, one, 2)
    with pytest.raises(TypeError, match="incompatible function arguments"):
        ops.write_tokens(tables, one.to("meta"), tokens, one)


@pytest.mark.parametrize(("requests", "width", "extra"), [(1, 1, None), (3, 5, 4), (2, 1, 0)])
@pytest.mark.parametrize("floats", [True, False])
def test_results_are_joined(
    backend: str, requests: int, width: int, extra: int | None, floats: bool
) -> None:
    generator = seeded(width)
    tokens = torch.randint(-1, 1 << 40, (requests, width), generator=generator).to(DEVICE)
    largest = torch.randn(requests, width, generator=generator).to(DEVICE)
    largest[0, 0] = torch.nan
    more = None
    if extra is not None:
        more = torch.randn(requests, extra + 1, generator=generator).to(DEVICE)[:, 1:]
        more = more if floats else (more * 9).long()
    counts = torch.randint(1 << 33, (requests, 5), generator=generator).to(DEVICE).unbind(1)
    given = tokens, largest, more, counts, (1, 1 << 60, 3, 4)
    ours = ops_of(backend).pack_results(*given)
    assert torch.equal(ours, REFERENCE.pack_results(*given))
    assert ours.shape == (requests, 2 * width + (extra or 0) + 9)
    assert ours[-1, -9:].tolist() == [*(int(count[-1]) for count in counts), 1, 1 << 60, 3, 4]
    bits = ours[:, width : 2 * width].int().view(torch.float32)
    assert torch.equal(bits.nan_to_num(7), largest.nan_to_num(7))
