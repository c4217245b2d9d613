"""The order in which a pipeline issues work and communication: it must be the same on every rank."""

from __future__ import annotations

import weakref

import pytest
import torch
import torch.distributed as dist

from helpers.processes import run
from lightning_moe.dispatch import select_dispatcher
from lightning_moe.overlap import primitives
from lightning_moe.overlap.gradient_sums import GradientTarget
from lightning_moe.overlap.lanes import Communication, Lanes, pipeline
from lightning_moe.overlap.primitives import Weights
from overlap.dense import NUM_EXPERTS, make_case


class NotedLanes:
    """Lanes that note what is issued, after which mark, and when it was waited for."""

    def __init__(self, events: list) -> None:
        self.events = events

    def mark(self):
        return len(self.events)

    def communicate(self, communication, after=None):
        (name,) = communication.args
        communication.run(name)
        ticket = type("Ticket", (), {})()
        ticket.wait = lambda: self.events.append(f"wait for {name}")
        return ticket


def calls(num_chunks: int, finishing: bool = False) -> list[str]:
    events: list[str] = []

    def arrive(i):
        return Communication(events.append, (f"arrive {i}",)), f"rows {i}"

    def take(i, arrived):
        assert arrived == f"rows {i}"
        events.append(f"take {i}")
        return f"sorted rows {i}"

    def work(i, taken):
        assert taken == f"sorted rows {i}"
        events.append(f"work {i}")
        return f"product {i}"

    def leave(i, product):
        assert product == f"product {i}"
        return Communication(events.append, (f"leave {i}",))

    def finish(i, product):
        assert product == f"product {i}"
        events.append(f"finish {i}")

    pipeline(NotedLanes(events), range(num_chunks), arrive, take, work, leave, finish if finishing else None)
    return events


def test_three_chunks_overlap_with_their_neighbours():
    assert calls(3) == [
        *("arrive 0", "wait for arrive 0", "take 0", "work 0", "arrive 1", "leave 0"),
        *("wait for arrive 1", "take 1", "work 1", "arrive 2", "wait for leave 0", "leave 1"),
        *("wait for arrive 2", "take 2", "work 2", "wait for leave 1", "leave 2", "wait for leave 2"),
    ]


def test_what_nobody_waits_for_runs_beside_the_leaving():
    assert calls(2, finishing=True) == [
        *("arrive 0", "wait for arrive 0", "take 0", "work 0", "arrive 1", "leave 0", "finish 0"),
        *("wait for arrive 1", "take 1", "work 1", "wait for leave 0", "leave 1", "finish 1", "wait for leave 1"),
    ]


def test_an_arrival_waits_for_the_mark_between_what_was_taken_in_and_the_work_beside_it():
    events, marks = [], {}

    class Marked(NotedLanes):
        def communicate(self, communication, after=None):
            marks[communication.args[0]] = self.mark() if after is None else after
            return super().communicate(communication, after)

    def arrive(i):
        events.append(f"room {i}")
        return Communication(events.append, (f"arrive {i}",)), i

    def leave(i, _):
        return Communication(events.append, (f"leave {i}",))

    def step(name):
        return lambda i, _: events.append(f"{name} {i}")

    pipeline(Marked(events), range(2), arrive, step("take"), step("work"), leave)
    assert events.index("take 0") < events.index("room 1") < marks["arrive 1"]
    assert marks["arrive 1"] <= events.index("work 0") < events.index("arrive 1")
    assert marks["leave 0"] > events.index("work 0")


@pytest.mark.parametrize("num_chunks", [1, 2, 4, 7])
def test_communication_alternates_and_every_ticket_is_waited_for(num_chunks):
    events = calls(num_chunks)
    expected = ["arrive 0"]
    for i in range(num_chunks):
        expected += [f"arrive {i + 1}"] * (i + 1 < num_chunks) + [f"leave {i}"]
    assert [event for event in events if event.startswith(("arrive", "leave"))] == expected
    for i in range(num_chunks):
        assert events.index(f"arrive {i}") < events.index(f"wait for arrive {i}") < events.index(f"work {i}")
        assert events.index(f"work {i}") < events.index(f"leave {i}") < events.index(f"wait for leave {i}")


def test_on_a_cpu_communication_runs_when_it_is_issued():
    done = []
    lanes = Lanes(torch.device("cpu"))
    ticket = lanes.communicate(Communication(done.append, (7,)), lanes.mark())
    assert done == [7]
    ticket.wait()
    assert done == [7]


class Recorder:
    """A dispatcher that notes its calls as (what, width)."""

    def __init__(self, dispatcher) -> None:
        self._dispatcher, self.calls = dispatcher, []

    def __getattr__(self, name):
        return getattr(self._dispatcher, name)

    def dispatch(self, plan, tokens, arriving):
        self.calls.append(("dispatch", [tokens_TX.shape[1] for tokens_TX in tokens]))
        self._dispatcher.dispatch(plan, tokens, arriving)

    def combine(self, plan, leaving, tokens):
        self.calls.append(("combine", [tokens_TX.shape[1] for tokens_TX in tokens]))
        self._dispatcher.combine(plan, leaving, tokens)


def recorded_exchanges(sizes: list[int], num_chunks: int) -> dict[str, list]:
    rank = dist.get_rank()
    case = make_case(rank, sizes[rank])
    mine = slice(rank * NUM_EXPERTS // len(sizes), (rank + 1) * NUM_EXPERTS // len(sizes))
    experts = Weights(case.gate_up_E2FH[mine], case.down_EHF[mine])
    recorder = Recorder(select_dispatcher("auto", dist.group.WORLD, torch.device("cpu")).dispatcher)
    plans = recorder.plan(case.ids_TK, case.weights_TK, NUM_EXPERTS, num_chunks)
    inputs, found = (case.tokens_TH, case.weights_TK), {}
    for mode in ("none", "dispatch", "full"):
        _, kept = primitives.forward(recorder, plans, *inputs, experts, mode)
        found[f"forward {mode}"], recorder.calls = recorder.calls, []
        primitives.backward(
            recorder, plans, kept, case.grad_TH, case.tokens_TH, experts, [GradientTarget(case.grad_TH.dtype)] * 2
        )
        found[f"backward {mode}"], recorder.calls = recorder.calls, []
    return found


def test_ranks_exchange_in_one_order_whatever_their_tokens():
    """A rank with no tokens and one with fewer tokens than chunks issue what the others do; forward combines only once a
    chunk, and a recompute combines no output."""
    by_rank = run(recorded_exchanges, 4, [0, 9, 1, 3], 3)
    hidden, top_k = make_case(0, 1).tokens_TH.shape[1], make_case(0, 1).weights_TK.shape[1]

    def order(arriving: list[int], leaving: list[int]) -> list:
        arrive, leave = ("dispatch", arriving), ("combine", leaving)
        return [arrive, arrive, leave, arrive, leave, leave]  # three chunks travel, between two that stay

    expected = {
        **{f"forward {mode}": order([hidden, top_k, top_k], [hidden]) for mode in ("none", "dispatch", "full")},
        "backward none": order([hidden], [hidden, top_k]),
        "backward dispatch": order([hidden, hidden], [hidden, top_k]),
        "backward full": order([hidden, hidden], [hidden, top_k]),
    }
    assert by_rank == [expected] * 4


class Payload:
    """Something that a weak reference can watch."""


def test_what_a_chunk_needs_no_more_is_gone_before_the_next_ones_work():
    alive: list[list[bool]] = []
    watched: list[weakref.ref] = []

    def arrive(i):
        return Communication(len, ([],)), Payload()

    def take(i, arrived):
        watched.append(weakref.ref(arrived))
        alive.append([rows() is not None for rows in watched])
        return Payload()

    def work(i, taken):
        assert all(payload() is None for payload in watched)
        product = Payload()
        watched.extend((weakref.ref(taken), weakref.ref(product)))
        return product

    def leave(i, product):
        return Communication(len, ([],))

    pipeline(Lanes(torch.device("cpu")), range(3), arrive, take, work, leave, lambda i, product: None)
    assert alive == [[False] * 3 * i + [True] for i in range(3)]


@pytest.mark.parametrize("failing", ["arrive", "take", "work", "leave", "finish"])
def test_an_error_waits_for_the_communication_that_is_still_running(failing):
    class Joined(NotedLanes):
        def join(self):
            self.events.append("join")

    events = []

    def step(name, result=None):
        def call(i, *_):
            if name == failing and i == 1:
                raise KeyError(name)
            return result

        return call

    nothing = Communication(lambda _: None, ("nothing",))
    arrive, leave = step("arrive", (nothing, None)), step("leave", nothing)
    with pytest.raises(KeyError, match=failing):
        pipeline(Joined(events), range(3), arrive, step("take"), step("work"), leave, step("finish"))
    assert events[-1] == "join"
