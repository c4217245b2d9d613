"""The size of the expert-parallel groups."""

from __future__ import annotations

import pytest

from lightning_moe.parallel.mesh import resolve_expert_parallel_size


@pytest.mark.parametrize(
    ("world_size", "ranks_per_host", "expert_counts", "size"),
    [
        (8, 8, [128], 8),
        (16, 8, [128], 8),  # not 16: a group stays on one host
        (12, 6, [128], 2),  # not 4, which would straddle hosts of 6
        (8, 8, [60], 4),
        (8, 8, [128, 60], 4),
        (8, 8, [7], 1),
        (4, 1, [128], 1),
    ],
)
def test_auto_divides_everything_and_stays_on_one_host(world_size, ranks_per_host, expert_counts, size):
    assert resolve_expert_parallel_size("auto", world_size, ranks_per_host, expert_counts) == size


def test_a_number_may_span_hosts():
    assert resolve_expert_parallel_size(16, 16, 8, [128]) == 16


def test_a_number_that_fits_not_names_those_that_do():
    with pytest.raises(ValueError, match="`expert_parallel_size=8` must divide the number of experts.*60.*: 1, 2, 4;"):
        resolve_expert_parallel_size(8, 8, 8, [60])
