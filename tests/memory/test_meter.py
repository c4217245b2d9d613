"""Memory by phase and owner, against a count of every storage that the step's ops make; and what is said when it ends."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from helpers.decoder import VOCABULARY, Decoder
from lightning_moe import buffers
from lightning_moe.bench.storages import Storages
from lightning_moe.callbacks import MemoryMonitor
from lightning_moe.memory import CATEGORIES, OUTSIDE, PHASES, TEMPORARY, meter
from lightning_moe.memory.gauge import HostGauge, Reading, gauge_of
from lightning_moe.memory.meter import Load
from lightning_moe.memory.out_of_memory import Situation, explain, is_out_of_memory
from lightning_moe.memory.summary import GIB, summarize

HIDDEN, WIDTH, LAYERS, TOP_K, EXPERTS = 32, 48, 2, 3, 8


class Allocator(Storages):
    """A gauge that knows of every storage, and looks after each op."""

    name = "allocated"

    def __init__(self):
        super().__init__()
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.peak = max(self.peak, self.live_bytes())
        return result

    def live_bytes(self):
        self.made = {cdata: reference for cdata, reference in self.made.items() if not reference.expired()}
        return super().live_bytes()

    def read(self):
        used = self.live_bytes()
        peak, self.peak = max(self.peak, used), used
        return Reading(used, peak, 2 * used, 2 * peak, 0, 0)


class Held:
    """Buffers beside the allocator."""

    def __init__(self, kind, size):
        self.kind, self.size = kind, size
        buffers.subscribe(self)

    def held_bytes(self):
        return self.size


@pytest.mark.parametrize("gradients_go", ["after the step", "after forward"])  # as in loops, and as in the Trainer
def test_categories_are_what_they_say_and_sum_to_the_peak(gradients_go, monkeypatch):
    with Allocator() as allocator:
        monkeypatch.setattr(meter, "gauge_of", lambda _: allocator)
        monkeypatch.setattr(buffers, "_subscribers", [])
        held = Held("communication", 5000)
        model = Decoder(LAYERS, HIDDEN, experts=EXPERTS, top_k=TOP_K, width=WIDTH, dropout=0.0)
        optimizer = torch.optim.AdamW(model.parameters())
        ids = torch.randint(VOCABULARY, (2, 40))
        monitor = MemoryMonitor(every_n_steps=2, folder=None)
        with monitor.watch(model):
            for _ in range(4):
                loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
                if gradients_go == "after forward":
                    monitor.on_before_zero_grad()
                    optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                if gradients_go == "after the step":
                    optimizer.zero_grad()
        assert held.kind

    parameters = sum(p.numel() * 4 for p in model.parameters())
    kept = LAYERS * ids.numel() * TOP_K * (HIDDEN + 3 * WIDTH) * 4
    assert [row["step"] for row in monitor.history] == [2, 4]
    for row in monitor.history:
        figures = {name: value if name in ("step", "expert_rows") else value * GIB for name, value in row.items()}
        for phase in PHASES:
            parts = {name: figures[f"{phase}/{name}"] for name in (*CATEGORIES, TEMPORARY)}
            assert sum(parts.values()) - parts[OUTSIDE] == figures[f"{phase}/peak_allocated"]
            assert figures[f"{phase}/peak_reserved"] == 2 * figures[f"{phase}/peak_allocated"]
            assert min(parts.values()) >= 0
            assert (parts["parameters"], parts[OUTSIDE]) == (parameters, 5000)
            assert parts["optimizer_state"] == 2 * parameters + 4 * len(optimizer.state)
        assert figures["forward/gradients"] == (parameters if gradients_go == "after forward" else 0)
        assert figures["optimizer/gradients"] == parameters
        assert kept <= figures["forward/expert_activations"] <= 1.05 * kept  # and the order of the rows
        assert figures["optimizer/expert_activations"] < 0.05 * kept
        assert figures["backward/temporary"] > 0
        assert figures["optimizer/rest"] < 0.02 * figures["optimizer/peak_allocated"]
        assert figures["peak_allocated"] >= max(figures[f"{phase}/peak_allocated"] for phase in PHASES)
        assert figures["allocated"] == figures["optimizer/peak_allocated"] - figures["optimizer/temporary"]
        assert figures["expert_rows"] == ids.numel() * TOP_K


def test_steps_are_those_of_the_modules_optimizers_together():
    model = Decoder(LAYERS, HIDDEN, experts=EXPERTS, top_k=TOP_K, width=WIDTH, dropout=0.0)
    ids, monitor = torch.randint(VOCABULARY, (2, 8)), MemoryMonitor(every_n_steps=1, folder=None)
    halves = [torch.optim.SGD(half.parameters(), momentum=0.9) for half in (model.layers, model.head)]
    size = sum(p.numel() * 4 for part in (model.layers, model.head) for p in part.parameters())
    with monitor.watch(model):
        for _ in range(3):
            shift = torch.zeros(VOCABULARY, requires_grad=True)
            inner = torch.optim.Adam([shift])
            for _ in range(2):
                (model(ids) + shift).square().sum().backward()
                inner.step()
            for optimizer in halves:
                optimizer.step()
                optimizer.zero_grad()
    assert [row["step"] for row in monitor.history] == [1, 2, 3]
    assert monitor.history[-1]["optimizer/optimizer_state"] * GIB == size


def test_resident_memory_and_its_peak():
    gauge = gauge_of(torch.device("cpu"))
    assert isinstance(gauge, HostGauge)
    before = gauge.read()
    block = torch.ones(100 << 20, dtype=torch.uint8)
    del block
    after = gauge.read()
    assert after.peak > before.used + (90 << 20)
    assert after.used < before.used + (50 << 20)
    assert gauge.read().peak < before.used + (50 << 20)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_allocators_figures():
    gauge = gauge_of(torch.device("cuda", torch.cuda.current_device()))
    kept = torch.ones(1 << 20, device="cuda")
    gauge.read()
    block = torch.ones(100 << 20, dtype=torch.uint8, device="cuda")
    del block
    reading = gauge.read()
    assert reading.used == torch.cuda.memory_allocated() >= kept.nbytes
    assert reading.peak == reading.used + (100 << 20)
    assert (reading.reserved, reading.peak) == (torch.cuda.memory_reserved(), gauge.read().used + (100 << 20))


def test_categories_are_of_the_rank_with_the_highest_peak():
    names = [
        "peak_allocated",
        "ooms",
        *(f"{p}/{n}" for p in PHASES for n in ("peak_allocated", *CATEGORIES, TEMPORARY)),
    ]
    by_rank = [[GIB * (10 * rank + i) for i in range(len(names))] for rank in range(3)]
    by_rank[1][names.index("backward/peak_allocated")] = GIB * 100
    summary = summarize(names, by_rank)
    assert summary["forward/gradients"] == by_rank[2][names.index("forward/gradients")] / GIB
    assert summary["backward/gradients"] == by_rank[1][names.index("backward/gradients")] / GIB
    assert summary["backward/gradients_spread"] == summary["peak_allocated_spread"] == 20
    assert (summary["ooms"], summary["ooms_spread"]) == (GIB * 21, GIB * 20)
    assert not [name for name in summarize(names, by_rank[:1]) if "spread" in name]


def test_the_message_names_place_and_shares_and_advice():
    reading = Reading(70 * GIB, 75 * GIB, 100 * GIB, 100 * GIB, 3, 1)
    held = {"parameters": 10 * GIB, "expert_activations": 50 * GIB, "rest": 9 * GIB, OUTSIDE: 0}
    rows = [1000.0] * 19 + [9000.0]
    message = explain(Situation(3, 41, "backward", "layers.2.mlp.experts", reading, held, Load(8192, 70000), rows))
    assert "on rank 3, in backward, in `layers.2.mlp.experts`, after 41 steps" in message
    assert "of it: expert activations 50.00 GiB, parameters 10.00 GiB, rest 9.00 GiB\n" in message
    assert "tokens: 8192 on this rank; its experts here had 70000 rows" in message
    assert "rank 19: 9000, rank 0: 1000, rank 1: 1000, rank 18: 1000; mean 1400" in message
    for advice in (
        "RecomputePolicy(routed=",
        "num_chunks",
        "balance the router",
        "30.00 GiB is reserved but in pieces",
    ):
        assert advice in message
    quiet = explain(Situation(0, 0, None, "", reading._replace(reserved=70 * GIB), {"optimizer_state": 1}, None, []))
    assert "between training steps" in quiet
    assert "smaller state" in quiet
    assert "rows" not in quiet


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_errors_that_say_that_memory_is_out(device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8, device=device)
    assert is_out_of_memory(caught.value)
    assert not is_out_of_memory(RuntimeError("mixed torch.Tensor and DTensor"))
    assert not is_out_of_memory(None)
