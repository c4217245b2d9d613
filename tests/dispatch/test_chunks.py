"""Cutting a batch into chunks, and counting what each chunk's experts get."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_moe.dispatch.base import chunk_slices
from lightning_moe.ops.rows import count_keys

checked = settings(max_examples=100, deadline=None, derandomize=True, database=None)


@checked
@given(st.integers(0, 10_000), st.integers(1, 40))
def test_chunks_are_contiguous_cover_the_batch_and_are_even(num_tokens, num_chunks):
    chunks = chunk_slices(num_tokens, num_chunks)
    assert len(chunks) == num_chunks
    assert chunks[0].start == 0
    assert chunks[-1].stop == num_tokens
    assert all(before.stop == after.start for before, after in pairwise(chunks))
    sizes = [chunk.stop - chunk.start for chunk in chunks]
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) == -(-num_tokens // num_chunks)


@checked
@given(st.lists(st.lists(st.integers(-1, 4), min_size=3, max_size=3), max_size=12), st.integers(1, 5))
def test_slots_are_counted_for_each_chunk_and_expert(rows, num_chunks):
    ids_TK = torch.tensor(rows, dtype=torch.int64).view(-1, 3)
    chunks = chunk_slices(len(rows), num_chunks)
    counts_CE = count_keys(ids_TK, 5, chunks)
    assert counts_CE.tolist() == [[sum(r.count(e) for r in rows[chunk]) for e in range(5)] for chunk in chunks]
