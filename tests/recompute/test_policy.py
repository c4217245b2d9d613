"""Names and errors of the recompute policy."""

from __future__ import annotations

import dataclasses

import pytest

from lightning_moe import RecomputePolicy
from lightning_moe.recompute.policy import PRESETS, ROUTED_MODES


@pytest.mark.parametrize("mode", ROUTED_MODES)
def test_every_mode_can_be_asked_for(mode):
    policy = RecomputePolicy(routed=mode)
    assert policy.routed == mode
    assert RecomputePolicy.of(policy) is policy


def test_presets_name_their_mode():
    assert ROUTED_MODES == ("none", "act", "dispatch", "full")
    assert {name: RecomputePolicy.of(name).routed for name in PRESETS} == {"none": "none", "full": "full"}
    assert RecomputePolicy() == RecomputePolicy.of("none")


@pytest.mark.parametrize("routed", ["all", "", "Full", None, True])
def test_an_unknown_mode_is_refused_with_the_known_ones(routed):
    with pytest.raises(ValueError, match="argument `routed` of `RecomputePolicy`") as error:
        RecomputePolicy(routed=routed)
    assert all(repr(mode) in str(error.value) for mode in ROUTED_MODES)
    assert str(error.value).endswith(f"but got {routed!r}.")


@pytest.mark.parametrize("recompute", ["act", "dispatch", "ful", "", None])
def test_an_unknown_preset_is_refused_with_the_way_out(recompute):
    """A mode that is no preset too: the message shows how to ask for it."""
    with pytest.raises(ValueError, match="argument `recompute` to be one of 'none', 'full'") as error:
        RecomputePolicy.of(recompute)
    assert f"but got {recompute!r}" in str(error.value)
    assert "RecomputePolicy(routed='act')" in str(error.value)


def test_a_policy_is_a_value():
    policy = RecomputePolicy(routed="act")
    assert {policy: 1}[RecomputePolicy(routed="act")] == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.routed = "full"
