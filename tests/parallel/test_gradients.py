"""One norm over gradients on several meshes, and clipping by it, against ``torch.nn.utils`` on the whole tensors."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from helpers.processes import run
from lightning_moe import clip_grad_norm_, total_grad_norm

INF = float("inf")
NORM_TYPES = [1.0, 2.0, 3.0, INF]
SHAPES = {
    "world": (8, 3),
    "world, fewer rows than ranks": (1, 5),
    "world, uneven": (7,),
    "expert": (4, 6, 3),
    "expert, rows on one side only": (2, 1, 3),
    "expert, second of its layout": (4, 2, 2),
    "second axis only": (6, 2),
    "replicated": (3, 2),
    "plain": (5,),
    "plain, no gradient": (2, 2),
    "world, no gradient": (8, 2),
    "a layout of its own, no gradient": (4, 4),
}


def values(name: str, dtype=torch.float64):
    generator = torch.Generator().manual_seed(sorted(SHAPES).index(name))
    return torch.randn(SHAPES[name], generator=generator, dtype=torch.float64).to(dtype)


def whole_parameters(names, dtype=torch.float64) -> dict[str, nn.Parameter]:
    parameters = {name: nn.Parameter(torch.zeros(SHAPES[name], dtype=dtype)) for name in names}
    for name, parameter in parameters.items():
        if "no gradient" not in name:
            parameter.grad = values(name, dtype)
    return parameters


def sharded_parameters(names, dtype=torch.float64) -> dict[str, nn.Parameter]:
    """The same, laid out as a strategy does it: dense over the world, experts over EP (dim 0) and EDP (dim 1)."""
    world_size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("edp", "ep"))
    world = init_device_mesh("cpu", (world_size,))
    layouts = {
        "world": (world, [Shard(0)]),
        "expert": (mesh, [Shard(1), Shard(0)]),
        "second": (mesh, [Replicate(), Shard(0)]),
        "replicated": (world, [Replicate()]),
        "a layout": (world, [Shard(1)]),
    }
    parameters = {}
    for name, whole in whole_parameters(names, dtype).items():
        layout = next((layout for prefix, layout in layouts.items() if name.startswith(prefix)), None)
        if layout is None:
            parameters[name] = whole
            continue
        parameters[name] = nn.Parameter(distribute_tensor(whole.detach(), *layout))
        if whole.grad is not None:
            parameters[name].grad = distribute_tensor(whole.grad, *layout)
    return parameters


@pytest.mark.parametrize("norm_type", NORM_TYPES)
@pytest.mark.parametrize("max_norm", [0.7, 1e6])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_plain_tensors_are_clipped_as_torch_clips_them(dtype, max_norm, norm_type):
    """A gradient that is missing is left out; a bound above the norm changes nothing at all."""
    names = ["world", "expert", "plain", "plain, no gradient"]
    ours, theirs = (list(whole_parameters(names, dtype).values()) for _ in range(2))
    before = [p.grad.clone() for p in ours[:3]]
    norm = clip_grad_norm_((p for p in ours), max_norm, norm_type)
    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(theirs, max_norm, norm_type))
    for a, e in zip(ours[:3], theirs[:3], strict=True):
        torch.testing.assert_close(a.grad, e.grad)
    assert ours[3].grad is None
    assert [torch.equal(p.grad, b) for p, b in zip(ours, before, strict=False)] == [max_norm == 1e6] * 3
    expected = norm.item() if max_norm == 1e6 else max_norm
    assert total_grad_norm(ours, norm_type).item() == pytest.approx(expected, rel=1e-5)


def test_bf16_gradients_are_measured_in_float32():
    """torch.nn.utils takes this norm in bf16 and is off by up to 0.4 %."""
    parameter = nn.Parameter(torch.zeros(1000, dtype=torch.bfloat16))
    parameter.grad = torch.randn(1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    norm = total_grad_norm([parameter])
    assert norm.dtype == torch.float32
    exact = parameter.grad.double().norm()
    assert abs(norm - exact) <= 1e-6 * exact
    assert clip_grad_norm_([parameter], 0.7) == norm
    assert parameter.grad.dtype == torch.bfloat16
    assert parameter.grad.double().norm().item() == pytest.approx(0.7, rel=2**-8)


def test_parameters_of_two_dtypes_share_one_norm():
    parameters = [
        *whole_parameters(["plain", "world"], torch.float32).values(),
        *whole_parameters(["expert"], torch.float64).values(),
    ]
    exact = torch.cat([p.grad.double().flatten() for p in parameters]).norm()
    assert total_grad_norm(parameters).item() == pytest.approx(exact.item(), rel=1e-6)
    clip_grad_norm_(parameters, 0.5)
    assert [p.grad.dtype for p in parameters] == [torch.float32, torch.float32, torch.float64]
    assert total_grad_norm(parameters).item() == pytest.approx(0.5, rel=1e-5)


@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_nothing_to_clip_has_norm_zero(norm_type):
    assert clip_grad_norm_([], 1.0, norm_type).item() == 0.0
    assert total_grad_norm(iter(()), norm_type).item() == 0.0
    without = nn.Parameter(torch.zeros(3))
    empty = nn.Parameter(torch.zeros(0, 3))
    empty.grad = torch.zeros(0, 3)
    assert clip_grad_norm_([without, empty], 1.0, norm_type).item() == 0.0
    assert without.grad is None


@pytest.mark.parametrize("norm_type", NORM_TYPES)
@pytest.mark.parametrize("bad", [float("nan"), INF, -INF])
def test_a_norm_that_is_not_finite_is_an_error_only_when_asked(bad, norm_type):
    def parameters():
        found = list(whole_parameters(["plain", "world"]).values())
        found[1].grad[2, 1] = bad
        return found

    ours, theirs = parameters(), parameters()
    with pytest.raises(RuntimeError, match="error_if_nonfinite=False"):
        clip_grad_norm_(ours, 1.0, norm_type, error_if_nonfinite=True)
    assert all(torch.equal(a.grad.nan_to_num(), e.grad.nan_to_num()) for a, e in zip(ours, theirs, strict=True))
    norm = clip_grad_norm_(ours, 1.0, norm_type)
    expected = torch.nn.utils.clip_grad_norm_(theirs, 1.0, norm_type)
    torch.testing.assert_close(norm, expected, equal_nan=True)
    for a, e in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, e.grad, equal_nan=True)


def test_finite_norms_pass_the_check():
    parameters = list(whole_parameters(["plain"]).values())
    assert clip_grad_norm_(parameters, 1.0, error_if_nonfinite=True) > 0


def test_a_single_parameter_is_taken_as_torch_takes_it():
    parameter = whole_parameters(["plain"])["plain"]
    assert total_grad_norm(parameter).item() == pytest.approx(values("plain").norm().item())


class CountedReductions:
    def __init__(self) -> None:
        self.count, self._reduce = 0, dist.all_reduce
        dist.all_reduce = self

    def __call__(self, *args, **options):
        self.count += 1
        return self._reduce(*args, **options)


def clip_sharded(norm_types: list[float]) -> dict:
    """The norm, the clipped gradients, and how many reductions it took, for each type of norm."""
    found, counted = {}, CountedReductions()
    for norm_type in norm_types:
        parameters = sharded_parameters(SHAPES)
        counted.count = 0
        norm = clip_grad_norm_(parameters.values(), 0.7, norm_type)
        reductions = counted.count
        clipped = {n: p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for n, p in parameters.items()}
        found[norm_type] = norm, clipped, reductions
        assert total_grad_norm(parameters.values(), norm_type).item() == pytest.approx(0.7, rel=1e-4)
    narrow = sharded_parameters(["world", "world, fewer rows than ranks"], torch.float32)
    found["some ranks hold nothing"] = total_grad_norm(list(narrow.values())[1:])
    found["no gradient anywhere"] = total_grad_norm(sharded_parameters([n for n in SHAPES if "no grad" in n]).values())
    on_some_ranks = sharded_parameters(["world", "expert"])
    if dist.get_rank() == 0:
        on_some_ranks["world"].grad = None
    found["a gradient is missing on rank 0"] = total_grad_norm(on_some_ranks.values())
    return found


@pytest.mark.parametrize("world_size", [2, 4])
def test_shards_on_different_meshes_are_clipped_as_the_whole_tensors_are(world_size):
    """Each shard counts once, a replica once and not once a rank, empty shards and missing gradients not at all."""
    by_rank = run(clip_sharded, world_size, NORM_TYPES)
    for norm_type in NORM_TYPES:
        whole = whole_parameters(SHAPES)
        expected = torch.nn.utils.clip_grad_norm_(whole.values(), 0.7, norm_type)
        for norm, clipped, reductions in (found[norm_type] for found in by_rank):
            torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0)
            assert torch.equal(norm, by_rank[0][norm_type][0]), "the same bits on every rank"
            for name, parameter in whole.items():
                if parameter.grad is None:
                    assert clipped[name] is None, name
                else:
                    torch.testing.assert_close(clipped[name], parameter.grad, rtol=1e-12, atol=0)
            # Shard(0) and Shard(1) over the world, two for EDP x EP, one for Shard(0) on EP alone
            assert reductions == 5
    for found in by_rank:
        one_row = values("world, fewer rows than ranks").norm()
        assert found["some ranks hold nothing"].item() == pytest.approx(one_row.item(), rel=1e-6)
        assert found["no gradient anywhere"].item() == 0.0
        elsewhere = torch.cat([values("world")[8 // world_size :].flatten(), values("expert").flatten()]).norm()
        assert found["a gradient is missing on rank 0"].item() == pytest.approx(elsewhere.item())


def norms_with_a_bad_value_on_one_rank(bad: float, norm_type: float) -> list:
    """For each rank that may hold the value: the norm, and whether it is refused."""
    found = []
    for owner in range(dist.get_world_size()):
        parameters = sharded_parameters(["world", "expert", "plain"])
        if dist.get_rank() == owner:
            parameters["world"].grad.to_local()[0, 0] = bad
        norm = total_grad_norm(parameters.values(), norm_type).item()
        try:
            clip_grad_norm_(parameters.values(), 1.0, norm_type, error_if_nonfinite=True)
            found.append((norm, "clipped"))
        except RuntimeError:
            found.append((norm, "refused"))
    return found


@pytest.mark.parametrize(
    ("bad", "norm_type"),
    [
        (float("nan"), 2.0),
        (INF, 2.0),
        (-INF, INF),
        (float("nan"), INF),
    ],
)
def test_every_rank_refuses_what_one_rank_holds(bad, norm_type):
    for found in run(norms_with_a_bad_value_on_one_rank, 2, bad, norm_type):
        for norm, verdict in found:
            assert verdict == "refused"
            assert norm != norm if bad != bad else norm == INF


def norm_of_a_dim_that_is_sharded_twice() -> tuple[str, float]:
    """FSDP on top of a parameter whose first dim is sharded already, as tensor parallelism leaves it."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tensor"))
    layer = nn.Linear(3, 8, bias=False, dtype=torch.float64)
    layer.weight = nn.Parameter(distribute_tensor(values("world"), mesh["tensor"], [Shard(0)]))
    fully_shard(layer, mesh=mesh["fsdp"])
    layer.weight.grad = layer.weight.detach().clone()
    return type(layer.weight.placements[0]).__name__, total_grad_norm(layer.parameters()).item()


def test_a_dim_that_is_sharded_twice_is_summed_over_both_axes():
    for placement, norm in run(norm_of_a_dim_that_is_sharded_twice, 4):
        assert placement == "_StridedShard"
        assert norm == pytest.approx(values("world").norm().item())
