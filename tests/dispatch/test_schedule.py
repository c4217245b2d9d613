"""Which rows are worked on when: each once, in parts that are small enough, with the own ones around the others."""

from __future__ import annotations

from fractions import Fraction

import pytest

from lightning_moe.dispatch.schedule import Chunk, schedule

CHUNKS = range(1, 25)
on_groups = pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8, 64])


@on_groups
def test_each_row_is_worked_on_once_in_the_order_of_tokens(num_ranks):
    """Tokens whose rows travel are cut evenly, as the copies' places are."""
    for num_chunks in CHUNKS:
        chunks, num_units, num_travels = schedule(num_chunks, num_ranks)
        units = list(range(num_units))
        assert [unit for chunk in chunks if chunk.own for unit in units[chunk.units]] == units
        travels = [chunk for chunk in chunks if chunk.peers]
        if travels or num_ranks > 1:
            assert len(travels) == num_travels
            assert [unit for chunk in travels for unit in units[chunk.units]] == units
            assert all(chunk.units.stop - chunk.units.start == num_units // num_travels for chunk in travels)


@on_groups
def test_no_chunk_takes_more_than_its_part_of_balanced_rows(num_ranks):
    stay = Fraction(1, num_ranks)
    for num_chunks in CHUNKS:
        chunks, num_units, _ = schedule(num_chunks, num_ranks)
        for chunk in chunks:
            part = Fraction(chunk.units.stop - chunk.units.start, num_units)
            assert part * (stay * chunk.own + (1 - stay) * chunk.peers) <= Fraction(1, num_chunks)
        assert len(chunks) <= num_chunks + 2


@on_groups
def test_what_stays_is_worked_on_half_before_and_half_after_what_travels(num_ranks):
    for num_chunks in CHUNKS[1:]:
        chunks = schedule(num_chunks, num_ranks).chunks
        stays, travels = sum(chunk.own for chunk in chunks), sum(chunk.peers for chunk in chunks)
        before = stays // 2
        assert before > 0
        assert [chunk.own for chunk in chunks] == [True] * before + [False] * travels + [True] * (stays - before)
        assert [chunk.peers for chunk in chunks] == [False] * before + [True] * travels + [False] * (stays - before)


def test_one_chunk_takes_all():
    assert schedule(1, 4) == ((Chunk(slice(0, 1), own=True, peers=True),), 1, 1)
