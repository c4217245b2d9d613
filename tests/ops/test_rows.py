"""Row maps against index arithmetic on Python lists, and gather/reduce as each other's adjoint."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from lightning_moe.ops.rows import RowMap, accumulation_dtype, collect, gather, reduce
from ops.routings import checked, random_map

NAN = float("nan")


@st.composite
def copies(draw):
    """Of each row up to J copies, which lie anywhere, as lists; and J."""
    width = draw(st.integers(1, 4))
    there = draw(st.lists(st.lists(st.booleans(), min_size=width, max_size=width), max_size=9))
    places = iter(draw(st.permutations(range(sum(map(sum, there))))))
    return [[next(places) if one else -1 for one in row] for row in there], width


NO_ROWS = ([], 2)
NO_COPIES = ([[-1, -1], [-1, -1]], 2)
ONE_ROW_HAS_ALL = ([[-1, -1, -1], [2, 0, 1], [-1, -1, -1]], 3)
EVERY_COPY = ([[3, 5], [0, 4], [2, 1]], 2)


def on_every_edge(test):
    for case in (NO_ROWS, NO_COPIES, ONE_ROW_HAS_ALL, EVERY_COPY):
        test = example(case)(test)
    return checked(given(copies())(test))


def map_of(places, width: int) -> RowMap:
    return RowMap(torch.tensor(places, dtype=torch.int32).view(-1, width), sum(p >= 0 for row in places for p in row))


def sources(places) -> list[int]:
    """The row that each place is a copy of."""
    by_place = {place: m for m, row in enumerate(places) for place in row if place >= 0}
    return [by_place[place] for place in range(len(by_place))]


def outputs(num_rows: int, width: int):
    """An output of its own, and one that is columns of wider rows. Both hold NaN."""
    yield torch.full((num_rows, width), NAN, dtype=torch.float64)
    yield torch.full((num_rows, width + 3), NAN, dtype=torch.float64)[:, 2 : 2 + width]


def draw(*shape: int, dtype=torch.float64, seed: int = 0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@on_every_edge
def test_gather_copies_each_row_to_all_its_places(case):
    places, _ = case
    row_map, source_of = map_of(*case), sources(places)
    source_MX = draw(len(places), 3)
    for out_RX in outputs(len(source_of), 3):
        gather(source_MX, row_map, out_RX)
        assert out_RX.tolist() == [source_MX[m].tolist() for m in source_of]


@on_every_edge
def test_reduce_sums_the_copies_of_each_row(case):
    """And what the first rows hold already, however many they are; what the others hold is overwritten."""
    places, _ = case
    row_map = map_of(*case)
    copies_RX, before_MX = draw(row_map.num_copies, 3), draw(len(places), 3, seed=1)
    sums = [[sum(copies_RX[p, x].item() for p in row if p >= 0) for x in range(3)] for row in places]
    for num_summed in range(len(places) + 1):
        expected_MX = torch.tensor(sums, dtype=torch.float64).view(-1, 3)
        expected_MX[:num_summed] += before_MX[:num_summed]
        for out_MX in outputs(len(places), 3):
            out_MX[:num_summed] = before_MX[:num_summed]
            reduce(copies_RX, row_map, out_MX, num_summed)
            torch.testing.assert_close(out_MX, expected_MX, rtol=1e-14, atol=1e-14)
            if num_summed == 0:
                reduce(copies_RX, row_map, out_MX.fill_(NAN))
                torch.testing.assert_close(out_MX, expected_MX, rtol=1e-14, atol=1e-14)


@on_every_edge
def test_collect_brings_each_number_to_the_slot_of_its_copy(case):
    """Likewise."""
    places, width = case
    row_map = map_of(*case)
    values_R = torch.arange(1.0, 1 + row_map.num_copies, dtype=torch.float64)
    for num_summed in range(len(places) + 1):
        expected = [
            [(p + 1.0 if p >= 0 else 0.0) + (100.0 if m < num_summed else 0.0) for p in row]
            for m, row in enumerate(places)
        ]
        for out_MJ in outputs(len(places), width):
            out_MJ[:num_summed] = 100.0
            collect(values_R, row_map, out_MJ, num_summed)
            assert out_MJ.tolist() == expected
            if num_summed == 0:
                collect(values_R, row_map, out_MJ.fill_(NAN))
                assert out_MJ.tolist() == expected


@on_every_edge
def test_gather_and_reduce_are_adjoint(case):
    """<gather(x), r> == <x, reduce(r)>."""
    row_map = map_of(*case)
    x_MX, r_RX = draw(row_map.copies_MJ.shape[0], 3), draw(row_map.num_copies, 3, seed=1)
    gathered_RX, back_MX = torch.full_like(r_RX, NAN), torch.full_like(x_MX, NAN)
    gather(x_MX, row_map, gathered_RX)
    reduce(r_RX, row_map, back_MX)
    assert abs((gathered_RX * r_RX).sum() - (x_MX * back_MX).sum()) <= 1e-12


@pytest.mark.parametrize("num_summed", [0, 15, 40])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_reduce_rounds_once(dtype, num_summed):
    """Summed in float32: what is left is one rounding to the output's dtype."""
    row_map = random_map(40, 4, missing=0.3)
    r_RX, before_MX = draw(row_map.num_copies, 33, dtype=dtype), draw(40, 33, dtype=dtype, seed=1)
    exact_MX, size_MX = torch.zeros(2, 40, 33, dtype=torch.float64).unbind(0)
    exact_MX[:num_summed] = before_MX[:num_summed].double()
    size_MX[:num_summed] = before_MX[:num_summed].double().abs()
    for m, row in enumerate(row_map.copies_MJ.tolist()):
        for place in filter(lambda place: place >= 0, row):
            exact_MX[m] += r_RX[place].double()
            size_MX[m] += r_RX[place].double().abs()
    reduce(r_RX, row_map, before_MX, num_summed)
    bound_MX = torch.finfo(dtype).eps / 2 * exact_MX.abs() * 1.001 + 5 * 2.0**-24 * size_MX
    assert ((before_MX.double() - exact_MX).abs() <= bound_MX).all()


def test_reduce_does_not_depend_on_where_copies_lie():
    """Bitwise: the order of the sum is that of a source row's slots, not of the rows."""
    row_map = random_map(40, 4, missing=0.3)
    r_RX = draw(row_map.num_copies, 8, dtype=torch.float32)
    moved_R = torch.randperm(row_map.num_copies, generator=torch.Generator().manual_seed(2))
    elsewhere_RX = torch.empty_like(r_RX)
    elsewhere_RX[moved_R] = r_RX
    new_place_MJ = moved_R[row_map.copies_MJ.clamp(min=0).long()].int()
    other_map = RowMap(torch.where(row_map.copies_MJ >= 0, new_place_MJ, -1), row_map.num_copies)
    assert not torch.equal(row_map.copies_MJ, other_map.copies_MJ)
    first_MX, second_MX = torch.full((2, 40, 8), NAN).unbind(0)
    reduce(r_RX, row_map, first_MX)
    reduce(elsewhere_RX, other_map, second_MX)
    assert torch.equal(first_MX, second_MX)


def test_reduce_writes_only_its_buffer_and_lets_no_row_leak():
    """A missing copy adds nothing, even though row 0, which stands in for it, is not finite."""
    row_map = map_of([[0, 1], [-1, 2], [-1, -1], [3, -1]], 2)
    r_RX = torch.tensor([[NAN], [10.0], [20.0], [30.0]])
    for num_summed, expected in ((0, [20.0, 0.0, 30.0]), (3, [13.0, -7.0, 30.0])):
        around = torch.full((6, 3), -7.0)
        reduce(r_RX, row_map, around[1:5, 1:2], num_summed)
        assert around[2:5, 1].tolist() == expected
        assert around[1, 1].isnan()
        around[1:5, 1] = -7.0
        assert (around == -7.0).all()


def test_gather_and_collect_write_only_their_buffers():
    row_map = map_of([[2, -1], [0, 1]], 2)
    around = torch.full((5, 4), -7.0)
    gather(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), row_map, around[1:4, 1:3])
    assert around[1:4, 1:3].tolist() == [[3.0, 4.0], [3.0, 4.0], [1.0, 2.0]]
    around[1:4, 1:3] = -7.0
    collect(torch.tensor([1.0, 2.0, 3.0]), row_map, around[1:3, 1:3], 1)
    assert around[1:3, 1:3].tolist() == [[-4.0, -7.0], [1.0, 2.0]]
    around[1:3, 1:3] = -7.0
    assert (around == -7.0).all()


def test_nothing_to_sum_leaves_what_is_there_and_clears_the_rest():
    row_map = map_of([[-1, -1]] * 4, 2)
    for operation, values in ((reduce, torch.empty(0, 2)), (collect, torch.empty(0))):
        out = torch.full((4, 2), 5.0)
        operation(values, row_map, out, 3)
        assert out.tolist() == [[5.0, 5.0]] * 3 + [[0.0, 0.0]]


def test_collect_lets_no_number_leak():
    """A slot without a copy is zero, though the first and the last number are not finite."""
    out_MJ = torch.full((2, 3), 5.0)
    collect(torch.tensor([NAN, 2.0, NAN]), map_of([[-1, 1, -1], [0, -1, 2]], 3), out_MJ)
    assert out_MJ[0].tolist() == [0.0, 2.0, 0.0]
    assert out_MJ[1].isnan().tolist() == [True, False, True]
    assert out_MJ[1, 1] == 0.0


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8, torch.bfloat16])
def test_gather_moves_what_it_is_given(dtype):
    row_map = random_map(40, 4)
    source_MX = torch.arange(2 * 40).view(-1, 2).to(dtype)
    gathered_RX = torch.zeros(row_map.num_copies, 2, dtype=dtype)
    gather(source_MX, row_map, gathered_RX)
    assert torch.equal(gathered_RX, source_MX[sources(row_map.copies_MJ.tolist())])


def test_sums_are_taken_in_float32_at_least():
    dtypes = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    assert [accumulation_dtype(dtype) for dtype in dtypes] == [torch.float32] * 3 + [torch.float64]
