"""The same global batches give the same training, however the ranks are laid out and whichever framework runs it."""

from __future__ import annotations

from functools import cache

import pytest

from helpers.models import relative_error
from helpers.processes import run
from helpers.training import train_plainly, train_with_fabric, train_with_trainer

expected = cache(train_plainly)


@pytest.mark.parametrize("train", [train_with_trainer, train_with_fabric], ids=["trainer", "fabric"])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("layout", [(1, 1), (2, 1), (1, 2), (2, 2)], ids=lambda layout: f"ep{layout[0]}-edp{layout[1]}")
def test_five_clipped_adamw_steps_equal_plain_torch(layout, accumulate, train):
    ep_size, edp_size = layout
    losses, norms, weights = expected(accumulate)
    for rank_losses, rank_norms, rank_weights in run(
        train, ep_size * edp_size, ep_size, ep_size * edp_size, accumulate, init=False
    ):
        assert rank_losses == pytest.approx(losses, rel=1e-9)
        assert rank_norms == pytest.approx(norms, rel=1e-9)
        assert rank_weights.keys() == weights.keys()
        errors = {name: relative_error(rank_weights[name], weights[name]) for name in weights}
        assert max(errors.values()) < 1e-8, errors
    assert min(norms) > 0.3, "clipping must have been active"
