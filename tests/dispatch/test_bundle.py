"""Tensors side by side in rows of bytes: where they lie, and that they do not touch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_moe.dispatch.bundle import columns, empty, row_bytes

checked = settings(max_examples=80, deadline=None, derandomize=True, database=None)
DTYPES = [torch.uint8, torch.bfloat16, torch.float32, torch.int32, torch.float64, torch.int64]
FILL = 0xA5
NARROW = {torch.int64: torch.int32}  # what travels as something else
anything = st.lists(st.tuples(st.sampled_from(DTYPES), st.integers(1, 40)), min_size=1, max_size=4)


def like(kinds):
    return [torch.empty(1, width, dtype=dtype) for dtype, width in kinds]


def bytes_of(num_rows: int, width: int, dtype, seed: int):
    """Any bits at all, as a tensor ``[num_rows, width]``."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_rows, width * dtype.itemsize)
    return torch.randint(256, shape, dtype=torch.uint8, generator=generator).view(dtype)


@checked
@given(anything, st.integers(0, 5))
def test_columns_share_the_bundles_memory_from_multiples_of_16_bytes_without_touching(kinds, num_rows):
    """Each is read back as it was written, and every byte that belongs to none keeps its value."""
    tensors = like(kinds)
    bundle_NW = empty(num_rows, row_bytes(tensors), torch.device("cpu")).fill_(FILL)
    belongs = torch.zeros(num_rows, bundle_NW.shape[1], dtype=torch.bool)
    views = columns(bundle_NW, tensors)
    assert len(views) == len(tensors)
    kinds = [(NARROW.get(dtype, dtype), width) for dtype, width in kinds]
    written = [bytes_of(num_rows, width, dtype, seed) for seed, (dtype, width) in enumerate(kinds)]
    for view_NX, values_NX, (dtype, width) in zip(views, written, kinds, strict=True):
        assert (view_NX.dtype, view_NX.shape, view_NX.stride(1)) == (dtype, (num_rows, width), 1)
        start = view_NX.storage_offset() * dtype.itemsize
        assert start % 16 == 0
        assert not belongs[:, start : start + width * dtype.itemsize].any()
        belongs[:, start : start + width * dtype.itemsize] = True
        view_NX.copy_(values_NX)
        assert torch.equal(bundle_NW[:, start : start + width * dtype.itemsize], values_NX.view(torch.uint8))
    for view_NX, values_NX in zip(views, written, strict=True):
        assert torch.equal(view_NX.contiguous().view(torch.uint8), values_NX.view(torch.uint8))
    assert (bundle_NW[~belongs] == FILL).all()


@checked
@given(anything)
def test_a_row_is_as_wide_as_its_padded_tensors(kinds):
    """So each of its tensors begins where wide loads begin, in every row."""
    sizes = [width * NARROW.get(dtype, dtype).itemsize for dtype, width in kinds]
    assert row_bytes(like(kinds)) == sum((size + 15) // 16 * 16 for size in sizes)


@pytest.mark.parametrize(
    ("kinds", "width", "starts"),
    [
        ([(torch.bfloat16, 8)], 16, [0]),
        ([(torch.bfloat16, 9)], 32, [0]),
        ([(torch.bfloat16, 2048), (torch.float32, 8), (torch.int32, 8)], 4160, [0, 4096, 4128]),
        ([(torch.float64, 3), (torch.float64, 1), (torch.int32, 5)], 80, [0, 32, 48]),
    ],
)
def test_known_layouts(kinds, width, starts):
    tensors = like(kinds)
    assert row_bytes(tensors) == width
    views = columns(empty(2, width, torch.device("cpu")), tensors)
    assert [view.storage_offset() * view.element_size() for view in views] == starts
    assert {view.stride(0) * view.element_size() for view in views} == {width}


def test_ids_travel_as_int32():
    """Whichever integers they came as."""
    tensors, same = (
        like([(torch.bfloat16, 9), (dtype, 3), (torch.float32, 1)]) for dtype in (torch.int64, torch.int32)
    )
    assert row_bytes(tensors) == row_bytes(same) == 64
    _, ids, behind = columns(empty(2, 64, torch.device("cpu")), tensors)
    assert (ids.dtype, ids.shape, ids.storage_offset()) == (torch.int32, (2, 3), 8)
    assert behind.storage_offset() == 12


def test_the_last_rows_of_a_bundle_are_a_bundle():
    """As the own rows are of an inbox."""
    tensors = like([(torch.bfloat16, 3), (torch.float64, 2)])
    bundle_NW = empty(7, row_bytes(tensors), torch.device("cpu")).fill_(FILL)
    numbers, others = columns(bundle_NW[4:], tensors)
    numbers.copy_(torch.arange(9.0).view(3, 3))
    others.copy_(torch.arange(6.0).view(3, 2))
    assert (bundle_NW[:4] == FILL).all()
    all_numbers, all_others = columns(bundle_NW, tensors)
    assert all_numbers[4:].flatten().tolist() == list(range(9))
    assert all_others[4:].flatten().tolist() == list(range(6))


def test_an_empty_bundle_has_its_width_and_device():
    bundle_NW = empty(3, 48, torch.device("meta"))
    assert (bundle_NW.shape, bundle_NW.dtype, bundle_NW.device.type) == ((3, 48), torch.uint8, "meta")
