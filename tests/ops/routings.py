"""Routings to draw from, and what sorting them comes to in plain Python."""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lightning_moe.ops.rows import RowMap

checked = settings(max_examples=80, deadline=None, derandomize=True, database=None)


class Case(NamedTuple):
    """Ids ``[T, K]`` as lists, K, P ranks and e experts on each."""

    rows: list[list[int]]
    top_k: int
    num_ranks: int
    num_local: int


@st.composite
def routings(draw):
    """Ids without repetition in a row, ``-1`` in any slot; few experts are often in use."""
    num_ranks, num_local = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    num_used = draw(st.integers(1, num_ranks * num_local))
    used = draw(st.permutations(range(num_ranks * num_local)))[:num_used]
    top_k = draw(st.integers(1, 4))
    chosen = st.lists(st.sampled_from(used), unique=True, max_size=min(top_k, num_used))
    rows = draw(st.lists(chosen, max_size=9))
    shift = draw(st.integers(0, top_k - 1))  # where the empty slots lie
    padded = [row + [-1] * (top_k - len(row)) for row in rows]
    return Case([row[shift:] + row[:shift] for row in padded], top_k, num_ranks, num_local)


NO_TOKENS = Case([], 2, 3, 2)
ALL_TO_ONE_EXPERT = Case([[4], [4], [4]], 1, 3, 2)
NO_EXPERT_AT_ALL = Case([[-1, -1], [-1, -1]], 2, 2, 2)
EVERY_EXPERT = Case([[3, 1, 0, 2], [0, 1, 2, 3]], 4, 2, 2)


def on_every_edge(test):
    """Run a test on the edge cases, then on what hypothesis draws."""
    for case in (NO_TOKENS, ALL_TO_ONE_EXPERT, NO_EXPERT_AT_ALL, EVERY_EXPERT):
        test = example(case)(test)
    return checked(given(routings())(test))


def ids_tensor(rows, top_k: int, dtype=torch.int32):
    return torch.tensor(rows, dtype=dtype).view(-1, top_k)


def sorted_slots(rows, first_expert: int, num_local: int) -> tuple[list[int], list[int], list[int]]:
    """Of the local experts' slots: in which order they come, each slot's place among them or -1, and where each's end."""
    keys = [expert - first_expert for row in rows for expert in row]
    slots = sorted((i for i, key in enumerate(keys) if 0 <= key < num_local), key=lambda i: (keys[i], i))
    places = [slots.index(i) if 0 <= key < num_local else -1 for i, key in enumerate(keys)]
    return slots, places, list(accumulate(map(keys.count, range(num_local))))


def random_ids(num_rows: int, num_experts: int, top_k: int, missing: float = 0.4, seed: int = 0):
    """int32 ``[num_rows, top_k]``, with slots that want no expert."""
    generator = torch.Generator().manual_seed(100 * num_rows + seed)
    ids_NK = torch.rand(num_rows, num_experts, generator=generator).argsort(1)[:, :top_k].int()
    return torch.where(torch.rand(ids_NK.shape, generator=generator) < missing, -1, ids_NK)


def random_map(num_rows: int, max_copies: int, missing: float = 0.4, seed: int = 0) -> RowMap:
    """Copies in a random order, each row with any number of them."""
    generator = torch.Generator().manual_seed(100 * num_rows + seed)
    there_MJ = torch.rand(num_rows, max_copies, generator=generator) >= missing
    num_copies = int(there_MJ.sum())
    copies_MJ = torch.full((num_rows, max_copies), -1, dtype=torch.int32)
    copies_MJ[there_MJ] = torch.randperm(num_copies, generator=generator).int()
    return RowMap(copies_MJ, num_copies)
