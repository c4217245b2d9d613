"""Buffers are counted and given back for as long as somebody holds them, and not a moment longer."""

from __future__ import annotations

import pytest

from lightning_moe import buffers


class Held:
    def __init__(self, kind: str, num_bytes: int, log: list[str]) -> None:
        self.kind, self.num_bytes, self.log = kind, num_bytes, log
        buffers.subscribe(self)

    def held_bytes(self) -> int:
        return self.num_bytes

    def release(self) -> None:
        self.log.append(f"{self.kind} {self.num_bytes}")
        self.num_bytes = 0


@pytest.fixture(autouse=True)
def _nobody_else(monkeypatch):
    monkeypatch.setattr(buffers, "_subscribers", [])


def test_bytes_are_counted_by_kind_and_released_in_the_order_of_subscription():
    log: list[str] = []
    subscribed = [Held("pinned", 3, log), Held("communication", 5, log), Held("pinned", 7, log)]
    assert buffers.held_bytes() == {"pinned": 10, "communication": 5}
    buffers.release_buffers()
    assert log == ["pinned 3", "communication 5", "pinned 7"]
    assert buffers.held_bytes() == {"pinned": 0, "communication": 0}
    assert len(subscribed) == 3


def test_what_is_gone_is_neither_counted_nor_released():
    log: list[str] = []
    held = Held("pinned", 3, log)
    in_a_cycle = Held("pinned", 4, log)
    in_a_cycle.itself = in_a_cycle  # only the collector finds it
    del held, in_a_cycle
    buffers.release_buffers()
    assert log == []
    assert buffers.held_bytes() == {}
