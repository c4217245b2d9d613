"""Which dispatcher a group gets, and what is refused."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from helpers.processes import run
from lightning_moe.dispatch import DISPATCHERS, LocalDispatcher, select_dispatcher
from lightning_moe.dispatch.all_to_all import AllToAllDispatcher
from lightning_moe.dispatch.select import _delivers, check_dispatcher_name
from lightning_moe.dispatch.transport import CollectiveTransport


def choices_in_groups_of_one_and_two() -> dict:
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    found = {}
    for size, group in ((1, alone), (2, dist.group.WORLD)):
        for name in DISPATCHERS:
            try:
                choice = select_dispatcher(name, group, torch.device("cpu"))
                assert choice.dispatcher.size == size
                found[size, name] = type(choice.dispatcher), choice.name, "; ".join(choice.reasons)
            except ValueError as error:
                found[size, name] = ValueError, str(error), None
    return found


def test_the_size_of_the_group_decides_and_a_name_overrides():
    by_rank = run(choices_in_groups_of_one_and_two, 2)
    assert by_rank[0] == by_rank[1]
    found = by_rank[0]
    assert found[1, "auto"] == (LocalDispatcher, "local", "the fastest that fits")
    assert found[1, "local"] == (LocalDispatcher, "local", "asked for by name")
    assert found[1, "all_to_all"] == (AllToAllDispatcher, "all_to_all over gloo", "asked for by name")
    kind, name, reason = found[2, "auto"]
    assert (kind, name) == (AllToAllDispatcher, "all_to_all over gloo")
    assert "not local, since the experts live on 2 ranks" in reason
    assert "not nvlink, since there is no GPU" in reason
    assert found[2, "all_to_all"] == (AllToAllDispatcher, "all_to_all over gloo", "asked for by name")
    kind, message, _ = found[2, "local"]
    assert kind is ValueError
    assert "dispatcher='local'" in message
    assert "2 ranks" in message
    assert "dispatcher='auto'" in message
    for size in (1, 2):
        kind, message, _ = found[size, "nvlink"]
        assert kind is ValueError
        assert "dispatcher='nvlink'" in message
        assert "there is no GPU" in message


class Stale(CollectiveTransport):
    """Rank 0 finds the rows of the first exchange in every later one."""

    first = None

    def exchange(self, way, traffic, outbox, inbox):
        super().exchange(way, traffic, outbox, inbox)
        self.first = inbox.clone() if self.first is None else self.first
        if dist.get_rank() == 0:
            inbox.copy_(self.first)


class Swapped(CollectiveTransport):
    """Brings the rows in another order than that of their sources."""

    def exchange(self, way, traffic, outbox, inbox):
        super().exchange(way, traffic, outbox, inbox)
        inbox.copy_(inbox.flip(0))


class Short(CollectiveTransport):
    """Leaves out the last byte of each row."""

    def exchange(self, way, traffic, outbox, inbox):
        super().exchange(way, traffic, outbox, inbox)
        inbox[:, -1] = 255


def self_checks() -> list[bool]:
    group = dist.group.WORLD
    return [_delivers(kind(group), group, torch.device("cpu")) for kind in (CollectiveTransport, Stale, Swapped, Short)]


def test_the_self_check_of_a_transport_sees_what_is_wrong():
    """A rank that finds nothing wrong with its own rows says so: the verdict is that of all."""
    assert run(self_checks, 3) == [[True, False, False, False], [True, True, False, False], [True, True, False, False]]


@pytest.mark.parametrize("name", ["", "Auto", "nccl", None])
def test_an_unknown_name_is_refused_with_the_known_ones(name):
    with pytest.raises(ValueError, match=r"`dispatcher` to be one of 'auto', .* but got") as error:
        check_dispatcher_name(name)
    assert all(repr(known) in str(error.value) for known in DISPATCHERS)
    assert str(error.value).endswith(f"but got {name!r}.")


@pytest.mark.parametrize("name", DISPATCHERS)
def test_a_known_name_passes(name):
    check_dispatcher_name(name)


def test_these_names_are_known():
    assert {"auto", "local", "nvlink", "all_to_all"} <= set(DISPATCHERS)
