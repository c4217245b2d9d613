"""A model that goes to the host and comes back is the same object, and trains on to the bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import FileStore, destroy_process_group, init_process_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.multiprocessing.reductions import StorageWeakRef

from helpers.devices import DEVICES
from lightning_moe import buffers
from lightning_moe.layers import GroupedExperts
from lightning_moe.memory.owners import Owners
from lightning_moe.offload import ModelOffloader
from lightning_moe.offload import model as engine
from lightning_moe.ops.local import local_part, sharded_parameters
from lightning_moe.overlap.gradient_sums import GradientSum


def tied() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8, bias=False))
    model[2].weight = model[0].weight
    return model


def train(device: str, away: bool) -> tuple[list[Tensor], list[int]]:
    """Three steps; where ``away``, the model leaves in each between forward, backward and step."""
    model = tied().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    offloader, before = ModelOffloader(model, [optimizer]), [id(p) for p in model.parameters()]

    def leave_and_return() -> None:
        if away:
            with offloader.offloaded():
                state = [t for s in optimizer.state.values() for t in s.values()]
                tensors = [*model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None), *state]
                assert all(t.untyped_storage().nbytes() == 0 for t in tensors if t.device.type == device)
            assert not offloader.is_offloaded

    for step in range(3):
        optimizer.zero_grad()
        torch.manual_seed(step)
        loss = model(torch.randn(5, 8).to(device)).square().sum()
        leave_and_return()
        loss.backward()
        leave_and_return()
        optimizer.step()
        leave_and_return()
    assert [id(p) for p in model.parameters()] == before
    return [p.detach() for p in model.parameters()], [p._version for p in model.parameters()]


@pytest.mark.parametrize("device", DEVICES)
def test_training_goes_on_as_if_nothing_had_happened(device):
    (actual, versions), (expected, expected_versions) = train(device, True), train(device, False)
    assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))
    assert versions == expected_versions


def test_what_is_offloaded_cannot_be_used_and_host_memory_goes_with_the_reload(monkeypatch):
    model, hosts, released = tied(), [], []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    hooks = [len(m._forward_pre_hooks) + len(m._state_dict_pre_hooks) for m in model.modules()]
    original = engine._Away.of
    monkeypatch.setattr(engine._Away, "of", lambda s: hosts.append(original(s)) or hosts[-1])
    monkeypatch.setattr(engine, "release_buffers", lambda: released.append(buffers.held_bytes()))
    offloader = ModelOffloader(model)
    offloader.add_optimizer(optimizer)
    offloader.add_optimizer(optimizer)
    offloader.offload()
    offloader.offload()
    assert len(released) == 1
    assert len(hosts) == 2  # the tied weight once, and the bias
    for use in (lambda: model(torch.zeros(8)), model[2].state_dict, optimizer.step, optimizer.state_dict):
        with pytest.raises(
            RuntimeError, match="cannot be used while the model is offloaded. Call `reload\\(\\)` first"
        ):
            use()
    memory = [StorageWeakRef(gone.host.untyped_storage()) for gone in hosts]
    hosts.clear()
    offloader.reload()
    offloader.reload()
    assert all(ref.expired() for ref in memory)
    assert [len(m._forward_pre_hooks) + len(m._state_dict_pre_hooks) for m in model.modules()] == hooks
    assert model(torch.zeros(8)).shape == (8,)
    optimizer.step()


def test_an_error_on_the_way_brings_everything_back(monkeypatch):
    model, original, moved = tied(), engine._Away.of, []

    def fail_at_the_second(storage):
        if moved:
            raise MemoryError
        moved.append(original(storage))
        return moved[-1]

    expected = model(torch.ones(8))
    monkeypatch.setattr(engine._Away, "of", fail_at_the_second)
    offloader = ModelOffloader(model)
    with pytest.raises(MemoryError):
        offloader.offload()
    assert len(moved) == 1
    assert not offloader.is_offloaded
    assert torch.equal(model(torch.ones(8)), expected)


def test_gradients_that_are_not_reduced_yet_leave_too(tmp_path):
    init_process_group("gloo", store=FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        results = []
        for away in (False, True):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
            mesh, mixed = init_device_mesh("cpu", (1,)), MixedPrecisionPolicy(None, torch.float64)
            fully_shard(model[0], mesh=mesh)
            fully_shard(model, mesh=mesh, mp_policy=mixed)  # sums what is not reduced yet beside the parameter
            offloader = ModelOffloader(model)
            for micro in range(3):
                model.set_requires_gradient_sync(micro == 2)
                model(torch.full((5, 8), 1.0 + micro)).sum().backward()
                if away and micro < 2:
                    known = list(sharded_parameters([model[0], model]))
                    grads = [p.unsharded_accumulated_grad for p in known] + [p._unsharded_param.grad for p in known]
                    grads = [local_part(g).untyped_storage() for g in grads if g is not None]
                    assert len(grads) >= 4
                    with offloader.offloaded():
                        assert [grad.nbytes() for grad in grads] == [0] * len(grads)
            results.append([local_part(p.grad) for p in model.parameters()])
        assert all(torch.equal(a, e) for a, e in zip(*results, strict=True))
    finally:
        destroy_process_group()


def test_gradients_that_experts_hold_back_leave_too():
    """Between micro-batches; ``MemoryMonitor`` counts them as gradients."""
    torch.manual_seed(0)
    experts, ids_TK = GroupedExperts(4, 16, 8), torch.tensor([[0, 2], [3, 1], [2, 3]])
    tokens_TH, weights_TK = torch.randn(3, 16), torch.rand(3, 2)
    experts.gradient_sums = sums = GradientSum(), GradientSum()
    for one in sums:
        one.holds = True
    experts(tokens_TH, weights_TK, ids_TK).sum().backward()
    totals = [one.total_eMN for one in sums]
    expected, owners = [total.clone() for total in totals], Owners(torch.device("cpu"))
    owners.add_module(experts)
    assert owners.held(0)["gradients"] == sum(total.nbytes for total in totals) > 0
    with ModelOffloader(experts).offloaded():
        assert [total.untyped_storage().nbytes() for total in totals] == [0, 0]
    assert all(torch.equal(total, e) for total, e in zip(totals, expected, strict=True))


def test_a_reload_that_fails_loses_nothing(monkeypatch):
    model, come_back = tied(), engine._Away.come_back
    expected = model(torch.ones(8))
    offloader = ModelOffloader(model)
    offloader.offload()

    def fail_at_the_weight(gone):
        if gone.host.numel() > 100:
            raise torch.OutOfMemoryError
        come_back(gone)

    monkeypatch.setattr(engine._Away, "come_back", fail_at_the_weight)
    with pytest.raises(torch.OutOfMemoryError):
        offloader.reload()
    with pytest.raises(RuntimeError, match="Call `reload\\(\\)` first"):
        model(torch.ones(8))
    monkeypatch.setattr(engine._Away, "come_back", come_back)
    offloader.reload()
    assert torch.equal(model(torch.ones(8)), expected)


def test_a_model_without_a_device_is_refused():
    with pytest.raises(
        ValueError, match="`0.weight` is still on the meta device, so there is no device to offload from"
    ):
        ModelOffloader(tied().to("meta")).offload()
