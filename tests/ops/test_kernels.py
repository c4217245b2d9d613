"""Each Triton kernel against its torch reference, which is the public function on CPU tensors.

They need a GPU. With Triton installed and ``TRITON_INTERPRET=1``, they also run, slowly, without one.
"""

from __future__ import annotations

import importlib.util
import os
from types import SimpleNamespace

import pytest
import torch

from lightning_moe.ops.grouped_mm import Groups, weight_gradient
from lightning_moe.ops.rows import RowMap, count_keys, gather, rank_keys, reduce, rows_by_key
from lightning_moe.ops.swiglu import swiglu, swiglu_backward

ON_GPU = torch.cuda.is_available()
INTERPRETED = not ON_GPU and os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if ON_GPU else "cpu"
HAVE_TRITON = importlib.util.find_spec("triton") is not None

pytestmark = pytest.mark.skipif(
    not HAVE_TRITON or not (ON_GPU or INTERPRETED), reason="Triton and a CUDA device are needed, or TRITON_INTERPRET=1"
)
on_gpu = pytest.mark.skipif(not ON_GPU, reason="a CUDA device is needed")
on_hopper = pytest.mark.skipif(
    not INTERPRETED and (not ON_GPU or torch.cuda.get_device_capability()[0] != 9), reason="a Hopper GPU is needed"
)

# the interpreter truncates to bfloat16 instead of rounding
DTYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.float32, torch.bfloat16, torch.float16]
NAN = float("nan")


@pytest.fixture
def kernels(monkeypatch):
    """The kernels' modules, on a GPU that seems to be small, so that a program takes several tiles."""
    from lightning_moe.ops.kernels import rows, sorting, swiglu, weight_gradient

    monkeypatch.setattr(weight_gradient, "_num_multiprocessors", lambda device: 5)
    return SimpleNamespace(rows=rows, sorting=sorting, swiglu=swiglu, weight_gradient=weight_gradient)


def draw(*shape: int, dtype=torch.float32, seed: int = 0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def routing(num_rows: int, num_experts: int, top_k: int, missing: float = 0.4):
    """Ids ``[num_rows, top_k]``, with slots that want no expert."""
    generator = torch.Generator().manual_seed(num_rows)
    ids_NK = torch.rand(num_rows, num_experts, generator=generator).argsort(1)[:, :top_k].int()
    return torch.where(torch.rand(ids_NK.shape, generator=generator) < missing, -1, ids_NK)


def routed(num_rows: int, num_experts: int, top_k: int):
    """A map of rows to experts on the CPU, and its copy on the device."""
    ids_NK = routing(num_rows, num_experts, top_k)
    row_map = rows_by_key(ids_NK, num_experts, int((ids_NK >= 0).sum())).rows
    return row_map, RowMap(row_map.source_R.to(DEVICE), row_map.copies_MJ.to(DEVICE))


# rows, width: less and more than a tile, with and without whole vectors, one and several tiles wide
WIDTHS = [(1, 1), (7, 3), (300, 8), (40, 33), (33, 512), (5, 2048), (3, 2056), (2, 5000)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "width"), WIDTHS)
def test_gather_copies_bit_for_bit(num_rows, width, dtype, kernels):
    on_cpu, row_map = routed(num_rows, num_experts=5, top_k=3)
    source_MX = draw(num_rows, width, dtype=dtype)
    gathered_RX = torch.full((len(row_map.source_R), width), NAN, dtype=dtype, device=DEVICE)
    kernels.rows.gather_rows(source_MX.to(DEVICE), row_map.copies_MJ, gathered_RX)
    assert torch.equal(gathered_RX.cpu(), gather(source_MX, on_cpu))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "width"), WIDTHS)
def test_reduce_sums_bit_for_bit(num_rows, width, dtype, kernels):
    """In float32 and in the same order as the reference, so that no bit differs."""
    on_cpu, row_map = routed(num_rows, num_experts=5, top_k=3)
    copies_RX = draw(max(row_map.source_R.shape[0], 1), width, dtype=dtype)
    expected_MX, out_MX = torch.empty(num_rows, width, dtype=dtype), torch.full((num_rows, width), NAN, dtype=dtype)
    out_MX = out_MX.to(DEVICE)
    reduce(copies_RX, on_cpu, expected_MX)
    kernels.rows.reduce_rows(copies_RX.to(DEVICE), row_map.copies_MJ, out_MX)
    assert torch.equal(out_MX.cpu(), expected_MX)


def test_rows_may_be_parts_of_wider_ones(kernels):
    on_cpu, row_map = routed(20, num_experts=4, top_k=2)
    wide_MX = draw(20, 48)
    gathered_RX = torch.full((len(row_map.source_R), 8), NAN, device=DEVICE)
    kernels.rows.gather_rows(wide_MX.to(DEVICE)[:, 16:24], row_map.copies_MJ, gathered_RX)
    assert torch.equal(gathered_RX.cpu(), gather(wide_MX[:, 16:24], on_cpu))
    around_MX, expected_MX = torch.full((20, 24), -7.0, device=DEVICE), torch.empty(20, 8)
    kernels.rows.reduce_rows(gathered_RX, row_map.copies_MJ, around_MX[:, 8:16])
    reduce(gathered_RX.cpu(), on_cpu, expected_MX)
    assert torch.equal(around_MX[:, 8:16].cpu(), expected_MX)
    around_MX[:, 8:16] = -7.0
    assert (around_MX == -7.0).all()


def test_a_missing_copy_adds_nothing(kernels):
    """Also where the row that stands at its place, row 0, is not finite."""
    copies_MJ = torch.tensor([[0, 1], [-1, 1], [-1, -1]], dtype=torch.int32, device=DEVICE)
    copies_RX = torch.tensor([[NAN], [10.0]], device=DEVICE)
    out_MX = torch.full((3, 1), NAN, device=DEVICE)
    kernels.rows.reduce_rows(copies_RX, copies_MJ, out_MX)
    assert out_MX[1:].flatten().tolist() == [10.0, 0.0]
    assert out_MX[0].isnan().all()


@pytest.mark.parametrize(("num_rows", "num_experts", "top_k"), [(1, 1, 1), (300, 5, 3), (129, 64, 8), (50, 130, 4)])
def test_keys_are_sorted_and_counted_as_by_the_reference(num_rows, num_experts, top_k, kernels):
    ids_NK = routing(num_rows, num_experts, top_k)
    num_keyed = int((ids_NK >= 0).sum())
    row_map, slots_R, ends = rows_by_key(ids_NK, num_experts, num_keyed)
    actual = kernels.sorting.sort_slots(ids_NK.to(DEVICE), num_experts, num_keyed)
    for one, other in zip(actual, (row_map.source_R, row_map.copies_MJ, slots_R, ends), strict=True):
        assert one.dtype == torch.int32
        assert torch.equal(one.cpu(), other)

    counts = torch.zeros(num_experts, dtype=torch.int32, device=DEVICE)
    kernels.sorting.add_counts(ids_NK.to(DEVICE), counts)
    assert torch.equal(counts.cpu(), count_keys(ids_NK, num_experts, [slice(0, num_rows)])[0])

    num_local = -(-num_experts // 3)
    ranks_TP = kernels.sorting.ranks_of_tokens(ids_NK.to(DEVICE), num_local, 3)
    assert torch.equal(ranks_TP.cpu(), rank_keys(ids_NK, num_local, 3))


def assert_rounded_once(actual, exact, inner: float = 2.0**-19, floor: float = 1e-30) -> None:
    """Within one rounding to the dtype of ``actual``, and ``inner`` for what precedes it in float32."""
    one_rounding = torch.finfo(actual.dtype).eps / 2 * 1.01
    error = (actual.cpu().double() - exact).abs()
    assert (error <= (one_rounding + inner) * exact.abs() + floor).all()


SHAPES = [(1, 1), (7, 5), (9, 256), (33, 96), (16, 768), (3, 1000)]


def swiglu_inputs(num_rows: int, width: int, dtype):
    gate_up_R2F = draw(num_rows, 2 * width, dtype=dtype) * 3
    return gate_up_R2F, draw(num_rows, seed=1).sigmoid(), draw(num_rows, width, dtype=dtype, seed=2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_swiglu(shape, dtype, kernels):
    gate_up_R2F, weights_R, _ = swiglu_inputs(*shape, dtype)
    act_RF = torch.full(shape, NAN, dtype=dtype, device=DEVICE)
    kernels.swiglu.swiglu_rows(gate_up_R2F.to(DEVICE), weights_R.to(DEVICE), act_RF)
    floor = torch.finfo(dtype).tiny
    assert_rounded_once(act_RF, swiglu(gate_up_R2F.double(), weights_R.double()), floor=floor)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_swiglu_backward(shape, dtype, in_place, kernels):
    """Both gradients and the rebuilt activation, in buffers of their own and over the inputs."""
    gate_up_R2F, weights_R, grad_RF = swiglu_inputs(*shape, dtype)
    act_RF = torch.empty(shape, dtype=torch.float64)
    exact_R2F, exact_R = swiglu_backward(grad_RF.double(), gate_up_R2F.double(), weights_R.double(), act_RF=act_RF)

    grad, gate_up, weights = grad_RF.to(DEVICE), gate_up_R2F.to(DEVICE), weights_R.to(DEVICE)
    if in_place:  # where the device is the CPU, `to` made no copy
        grad, gate_up = grad.clone(), gate_up.clone()
    grad_gate_up = gate_up if in_place else torch.full_like(gate_up, NAN)
    act = grad if in_place else torch.full_like(grad, NAN)
    grad_weights = torch.full_like(weights, NAN)
    kernels.swiglu.swiglu_backward_rows(grad, gate_up, weights, grad_gate_up, grad_weights, act)

    floor = max(torch.finfo(dtype).tiny, 2.0**-18)  # silu' crosses zero, where its relative error is not bounded
    assert_rounded_once(grad_gate_up, exact_R2F, floor=floor)
    assert_rounded_once(act, act_RF, floor=torch.finfo(dtype).tiny)
    size_R = (grad_RF.double() * act_RF / weights_R.double()[:, None]).abs().sum(1)
    assert ((grad_weights.cpu().double() - exact_R).abs() <= 2.0**-18 * size_R).all()


def test_swiglu_backward_without_the_activation_is_the_same_bits(kernels):
    gate_up, weights, grad = (x.to(DEVICE) for x in swiglu_inputs(9, 40, torch.bfloat16))
    results = []
    for act in (None, torch.empty_like(grad)):
        grad_gate_up, grad_weights = torch.empty_like(gate_up), torch.empty_like(weights)
        kernels.swiglu.swiglu_backward_rows(grad, gate_up, weights, grad_gate_up, grad_weights, act)
        results.append((grad_gate_up, grad_weights))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


# rows of each expert, of one or more chunks
COUNTS = [
    [(5, 0, 200, 64, 1)],
    [(0, 0, 70)],
    [(128,), (1,)],
    [(1, 1, 1, 300, 2, 0, 64, 65, 63)],
    [(130, 0, 7), (0, 0, 64), (65, 0, 0)],
]
SIDES = [(16, 16), (144, 272), (128, 512)]


def operands(counts, width_m: int, width_n: int, dtype):
    """A gradient and rows of all chunks, and after the last a row that is not finite and belongs to nobody."""
    counts = tuple(count for chunk in counts for count in chunk)
    grad_RM, rows_RN = draw(sum(counts) + 1, width_m, dtype=dtype), draw(sum(counts) + 1, width_n, dtype=dtype, seed=1)
    grad_RM[-1], rows_RN[-1] = NAN, float("inf")
    return grad_RM, rows_RN, Groups(counts, torch.tensor(counts).cumsum(0).int())


@on_hopper
@pytest.mark.parametrize("total", ["none", "in place", "read"])
@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("sides", SIDES, ids=str)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_weight_gradient(counts, sides, dtype, total, kernels):
    """Written, added in place, and added to a total, scaled and converted."""
    if INTERPRETED and total == "in place":
        pytest.skip("the interpreter knows no reduction through a tensor descriptor")
    grad_RM, rows_RN, groups = operands(counts, *sides, dtype)
    num_experts = len(counts[0])
    before_eMN = draw(num_experts, *sides, seed=2)
    out_eMN = torch.full(before_eMN.shape, NAN, dtype=dtype if total == "read" else torch.float32, device=DEVICE)
    total_eMN, scale = None, 1.0
    if total == "in place":
        total_eMN = out_eMN.copy_(before_eMN)
    elif total == "read":
        total_eMN, scale = before_eMN.to(DEVICE), 0.3
    kernels.weight_gradient.weight_gradient_of_experts(
        out_eMN, grad_RM.to(DEVICE), rows_RN.to(DEVICE), groups.ends_e.to(DEVICE), total_eMN, scale
    )
    exact_eMN = torch.zeros_like(before_eMN).double() if total_eMN is None else before_eMN.double()
    size_eMN = exact_eMN.abs()
    for group, rows in enumerate(groups.slices()):
        grad_MR, rows_rN = grad_RM[rows].double().t(), rows_RN[rows].double()
        exact_eMN[group % num_experts] += grad_MR @ rows_rN
        size_eMN[group % num_experts] += grad_MR.abs() @ rows_rN.abs()
    info = torch.finfo(out_eMN.dtype)
    rounding_eMN = info.eps / 2 * 1.01 * (exact_eMN * scale).abs().clamp(min=info.tiny)
    bound_eMN = rounding_eMN + max(groups.counts) * len(counts) * 2.0**-22 * size_eMN * scale
    assert ((out_eMN.cpu().double() - exact_eMN * scale).abs() <= bound_eMN).all()


@on_hopper
def test_one_experts_infinities_stay_its_own(kernels):
    grad_RM, rows_RN, groups = operands([(70, 70, 70)], 32, 48, torch.float16)
    rows_RN[70:140] = float("inf")
    out_eMN = torch.empty(3, 32, 48, device=DEVICE)
    kernels.weight_gradient.weight_gradient_of_experts(
        out_eMN, grad_RM.to(DEVICE), rows_RN.to(DEVICE), groups.ends_e.to(DEVICE), None, 1.0
    )
    assert out_eMN[[0, 2]].isfinite().all()
    assert not out_eMN[1].isfinite().any()


@on_gpu
def test_the_public_functions_take_the_kernels_on_a_gpu(kernels, monkeypatch):
    """And give what the references on the CPU give; empty inputs, which are no work for a kernel, included."""
    called = []
    for module, name in [
        (kernels.sorting, "sort_slots"),
        (kernels.rows, "gather_rows"),
        (kernels.rows, "reduce_rows"),
        (kernels.swiglu, "swiglu_rows"),
        (kernels.swiglu, "swiglu_backward_rows"),
    ]:
        kernel = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, name=name, kernel=kernel: called.append(name) or kernel(*args))
    for num_rows in (50, 0):
        on_cpu, row_map = routed(num_rows, num_experts=4, top_k=2)
        source_MX = draw(num_rows, 64)
        ids_NK = routing(num_rows, num_experts=4, top_k=2)
        sorted_rows = rows_by_key(ids_NK.cuda(), num_keys=4, num_rows=len(row_map.source_R))
        assert torch.equal(sorted_rows.rows.copies_MJ, row_map.copies_MJ)
        gathered_RX = gather(source_MX.cuda(), row_map)
        assert torch.equal(gathered_RX.cpu(), gather(source_MX, on_cpu))
        out_MX, expected_MX = torch.empty(num_rows, 64, device="cuda"), torch.empty(num_rows, 64)
        reduce(gathered_RX, row_map, out_MX)
        reduce(gathered_RX.cpu(), on_cpu, expected_MX)
        assert torch.equal(out_MX.cpu(), expected_MX)
        gate_up_R2F, weights_R, grad_RF = swiglu_inputs(num_rows, 24, torch.float32)
        act_RF = swiglu(gate_up_R2F.cuda(), weights_R.cuda())
        torch.testing.assert_close(act_RF.cpu(), swiglu(gate_up_R2F, weights_R))
        actual = swiglu_backward(grad_RF.cuda(), gate_up_R2F.cuda(), weights_R.cuda())
        for one, other in zip(actual, swiglu_backward(grad_RF, gate_up_R2F, weights_R), strict=True):
            torch.testing.assert_close(one.cpu(), other)
    assert called == ["sort_slots", "gather_rows", "reduce_rows", "swiglu_rows", "swiglu_backward_rows"]


@on_gpu
@pytest.mark.parametrize("counts", [(3, 0, 70), (0, 0, 0)], ids=str)
@pytest.mark.parametrize("sides", [(48, 32), (40, 24), (5, 3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_weight_gradients_over_chunks_on_a_gpu(counts, sides, dtype):
    """Three chunks, as backward calls it, with every width that a kernel takes or leaves to torch."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    totals, outs = [], []
    for device in ("cpu", "cuda"):
        total_eMN = torch.full((3, *sides), NAN, dtype=wide, device=device)
        out_eMN = torch.full((3, *sides), NAN, dtype=dtype, device=device)
        for chunk in range(3):
            grad_RM = draw(sum(counts), sides[0], seed=chunk).to(device, dtype)
            rows_RN = draw(sum(counts), sides[1], seed=9 + chunk).to(device, dtype)
            groups = Groups(counts, torch.tensor(counts).cumsum(0).int().to(device))
            if chunk == 0:
                weight_gradient(total_eMN, grad_RM, rows_RN, groups)
            elif chunk == 1:
                weight_gradient(total_eMN, grad_RM, rows_RN, groups, total_eMN)
            else:
                weight_gradient(out_eMN, grad_RM, rows_RN, groups, total_eMN, 0.5)
        totals.append(total_eMN.cpu())
        outs.append(out_eMN.cpu())
    torch.testing.assert_close(*totals, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(*outs, rtol=1e-2, atol=1e-2)
