"""Names and errors of the recompute policy."""

from __future__ import annotations

import dataclasses

import pytest

from lightning_moe import RecomputePolicy
from lightning_moe.recompute.policy import NAMES, PRESETS, ROUTED_MODES


@pytest.mark.parametrize("mode", ROUTED_MODES)
def test_every_mode_can_be_asked_for(mode):
    policy = RecomputePolicy(routed=mode)
    assert policy.routed == mode
    assert policy.moe_act == (mode == "act")
    assert RecomputePolicy.of(policy) is policy


def test_what_the_presets_name():
    assert ROUTED_MODES == ("none", "act", "dispatch", "full")
    assert {name: RecomputePolicy.of(name) for name in PRESETS} == {
        "none": RecomputePolicy(norm=False, attention=False, moe_act=False, shared_experts=False, routed="none"),
        "selective": RecomputePolicy(norm=True, moe_act=True, shared_experts=True),
        "full": RecomputePolicy(norm=True, attention=True, shared_experts=True, routed="full"),
    }
    assert RecomputePolicy() == RecomputePolicy.of("none")


@pytest.mark.parametrize("names", [[], ["norm"], ["attention", "norm"], ["shared_experts"], ("moe_act",), list(NAMES)])
def test_a_list_of_names_is_a_policy_of_these_parts(names):
    policy = RecomputePolicy.of(names)
    assert [name for name in NAMES if getattr(policy, name)] == [name for name in NAMES if name in names]
    assert policy.routed == ("act" if "moe_act" in names else "none")


def test_moe_act_is_the_mode_act():
    assert RecomputePolicy(moe_act=True) == RecomputePolicy(routed="act") == RecomputePolicy(moe_act=True, routed="act")
    assert RecomputePolicy(moe_act=True) != RecomputePolicy()


@pytest.mark.parametrize("mode", ["dispatch", "full"])
def test_moe_act_beside_another_mode_is_refused(mode):
    with pytest.raises(ValueError, match=f"moe_act=True.*routed='act'.*routed='{mode}'.*Leave `moe_act` out"):
        RecomputePolicy(moe_act=True, routed=mode)


@pytest.mark.parametrize("routed", ["all", "", "Full", None, True])
def test_an_unknown_mode_is_refused_with_the_known_ones(routed):
    with pytest.raises(ValueError, match="argument `routed` of `RecomputePolicy`") as error:
        RecomputePolicy(routed=routed)
    assert all(repr(mode) in str(error.value) for mode in ROUTED_MODES)
    assert str(error.value).endswith(f"but got {routed!r}.")


@pytest.mark.parametrize(
    "recompute", ["act", "dispatch", "ful", "", "norm", None, ["norms"], ["norm", "full"], [1], {"norm": True}]
)
def test_unknown_names_are_refused_with_the_known_ones(recompute):
    """A mode that is no preset too: the message shows how to ask for it."""
    with pytest.raises(ValueError, match="argument `recompute` to be one of 'none', 'selective', 'full'") as error:
        RecomputePolicy.of(recompute)
    assert f"but got {recompute!r}" in str(error.value)
    assert all(repr(name) in str(error.value) for name in NAMES)
    assert "RecomputePolicy(routed='act')" in str(error.value)


def test_a_policy_is_a_value():
    policy = RecomputePolicy(norm=True, routed="act")
    assert {policy: 1}[RecomputePolicy(norm=True, moe_act=True)] == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.routed = "full"
