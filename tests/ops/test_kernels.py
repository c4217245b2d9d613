"""Each Triton kernel against its torch reference, which is the public function on CPU tensors.

They need a GPU. With Triton installed and ``TRITON_INTERPRET=1``, they also run, slowly, without one.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import random
from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch

from lightning_moe.dispatch.bundle import columns, row_bytes
from lightning_moe.ops.grouped_mm import Groups, weight_gradient
from lightning_moe.ops.routing import Order, count_needs, place_copies, sort_by_expert
from lightning_moe.ops.rows import RowMap, collect, gather, reduce
from lightning_moe.ops.swiglu import swiglu, swiglu_backward
from ops.routings import random_ids, random_map

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
    from lightning_moe.ops.kernels import grouped_mm, launch, routing, rows, swiglu, weight_gradient

    for module in (grouped_mm, weight_gradient):
        monkeypatch.setattr(module, "num_multiprocessors", lambda device: 5)
    modules = {"grouped_mm": grouped_mm, "routing": routing, "rows": rows, "swiglu": swiglu}
    modules["weight_gradient"] = weight_gradient
    if INTERPRETED:  # nothing is compiled
        for module in modules.values():
            monkeypatch.setattr(module, "launch", interpret)
    return SimpleNamespace(launch=launch, **modules)


def interpret(kernel, grid, memory, numbers, constants, **options) -> None:
    kernel[grid](*memory, *numbers, *constants, **options)


def draw(*shape: int, dtype=torch.float32, seed: int = 0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def shifted(tensor):
    """The same on the device, one element away from where memory begins."""
    memory = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=DEVICE)
    view = memory[1:].view(tensor.shape)
    assert view.data_ptr() % 16
    return view.copy_(tensor)


class Bundle:
    """An output between other tensors' columns; they all hold NaN."""

    def __init__(self, num_rows: int, width: int, dtype) -> None:
        like = [torch.empty(1, 5, dtype=torch.int32), torch.empty(1, width, dtype=dtype), torch.empty(1, 3)]
        self.bundle_NW = torch.full((num_rows, row_bytes(like)), 255, dtype=torch.uint8, device=DEVICE)
        self.out_NX = columns(self.bundle_NW, like)[1]

    def take(self):
        """The output, on the CPU; nothing else may have been written."""
        rows_NX = self.out_NX.clone().cpu()
        self.out_NX.view({2: torch.int16, 4: torch.int32}[rows_NX.element_size()]).fill_(-1)
        assert (self.bundle_NW == 255).all()
        return rows_NX


def gathered(source_MX, row_map: RowMap):
    """By the reference, on the CPU."""
    out_RX = torch.full((row_map.num_copies, source_MX.shape[1]), NAN, dtype=source_MX.dtype)
    gather(source_MX, row_map, out_RX)
    return out_RX


def reduced(copies_RX, row_map: RowMap, before_MX=None, num_summed: int = 0):
    """Likewise."""
    out_MX = torch.full((row_map.copies_MJ.shape[0], copies_RX.shape[1]), NAN, dtype=copies_RX.dtype)
    out_MX[:num_summed] = before_MX[:num_summed] if num_summed else NAN
    reduce(copies_RX, row_map, out_MX, num_summed)
    return out_MX


def collected(values_R, row_map: RowMap, before_MJ=None, num_summed: int = 0):
    """Likewise."""
    out_MJ = torch.full(row_map.copies_MJ.shape, NAN, dtype=values_R.dtype)
    out_MJ[:num_summed] = before_MJ[:num_summed] if num_summed else NAN
    collect(values_R, row_map, out_MJ, num_summed)
    return out_MJ


def numbers_summed(num_rows: int) -> list[int]:
    """None, one, some, all but one, all."""
    return sorted({0, 1, num_rows // 3, num_rows - 1, num_rows})


# rows, width: less and more than a tile, with and without whole vectors, one and several tiles wide
WIDTHS = [(1, 1), (7, 3), (300, 8), (40, 33), (33, 512), (5, 2048), (3, 2056), (2, 5000)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "width"), WIDTHS)
def test_gather_copies_bit_for_bit(num_rows, width, dtype, kernels):
    """Into memory of its own, and into a column of a bundle."""
    on_cpu, source_MX = random_map(num_rows, 3, missing=0.2), draw(num_rows, width, dtype=dtype)
    out_RX = torch.full((on_cpu.num_copies, width), NAN, dtype=dtype, device=DEVICE)
    bundle = Bundle(on_cpu.num_copies, width, dtype)
    for out in (out_RX, bundle.out_NX):
        kernels.rows.gather_rows(source_MX.to(DEVICE), on_cpu.copies_MJ.to(DEVICE), out)
    assert torch.equal(out_RX.cpu(), gathered(source_MX, on_cpu))
    assert torch.equal(bundle.take(), gathered(source_MX, on_cpu))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "width"), WIDTHS)
def test_reduce_sums_bit_for_bit(num_rows, width, dtype, kernels):
    """In float32 and in the same order as the reference, so that no bit differs; added to what the first rows hold."""
    on_cpu = random_map(num_rows, 3, missing=0.2)
    copies_RX, before_MX = draw(on_cpu.num_copies, width, dtype=dtype), draw(num_rows, width, dtype=dtype, seed=1)
    for num_summed in numbers_summed(num_rows):
        out_MX, bundle = torch.full_like(before_MX, NAN, device=DEVICE), Bundle(num_rows, width, dtype)
        for out in (out_MX, bundle.out_NX):
            out[:num_summed] = before_MX[:num_summed].to(DEVICE)
            kernels.rows.reduce_rows(copies_RX.to(DEVICE), on_cpu.copies_MJ.to(DEVICE), out, num_summed)
        expected_MX = reduced(copies_RX, on_cpu, before_MX, num_summed)
        assert torch.equal(out_MX.cpu(), expected_MX)
        assert torch.equal(bundle.take(), expected_MX)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "max_copies"), [(1, 3), (7, 3), (300, 8), (1025, 1)])
def test_collect_brings_numbers_back_bit_for_bit(num_rows, max_copies, dtype, kernels):
    on_cpu = random_map(num_rows, max_copies, missing=0.2)
    values_R, before_MJ = draw(on_cpu.num_copies, dtype=dtype), draw(num_rows, max_copies, dtype=dtype, seed=1)
    for num_summed in numbers_summed(num_rows):
        out_MJ, bundle = torch.full_like(before_MJ, NAN, device=DEVICE), Bundle(num_rows, max_copies, dtype)
        for out in (out_MJ, bundle.out_NX):
            out[:num_summed] = before_MJ[:num_summed].to(DEVICE)
            kernels.rows.collect_values(values_R.to(DEVICE), on_cpu.copies_MJ.to(DEVICE), out, num_summed)
        expected_MJ = collected(values_R, on_cpu, before_MJ, num_summed)
        assert torch.equal(out_MJ.cpu(), expected_MJ)
        assert torch.equal(bundle.take(), expected_MJ)


@pytest.mark.parametrize("column", [16, 17])
def test_rows_may_be_parts_of_wider_ones(column, kernels):
    """Sources and outputs, from a place where wide loads begin and from another."""
    on_cpu = random_map(20, 2)
    copies_MJ = on_cpu.copies_MJ.to(DEVICE)
    wide_MX, part = draw(20, 48), slice(column, column + 8)
    wide_RX, wide_out_MX, slots_MX = (torch.full((n, 48), -7.0, device=DEVICE) for n in (on_cpu.num_copies, 20, 20))
    kernels.rows.gather_rows(wide_MX.to(DEVICE)[:, part], copies_MJ, wide_RX[:, part])
    kernels.rows.reduce_rows(wide_RX[:, part], copies_MJ, wide_out_MX[:, part], 9)
    values_R, slots = draw(on_cpu.num_copies), slice(column, column + 2)
    kernels.rows.collect_values(values_R.to(DEVICE), copies_MJ, slots_MX[:, slots], 9)
    expected_RX = gathered(wide_MX[:, part], on_cpu)
    assert torch.equal(wide_RX[:, part].cpu(), expected_RX)
    before_MX = torch.full((20, 8), -7.0)
    assert torch.equal(wide_out_MX[:, part].cpu(), reduced(expected_RX, on_cpu, before_MX, 9))
    assert torch.equal(slots_MX[:, slots].cpu(), collected(values_R, on_cpu, before_MX[:, :2], 9))
    for out, written in ((wide_RX, part), (wide_out_MX, part), (slots_MX, slots)):
        out[:, written] = -7.0
        assert (out == -7.0).all()


def test_a_missing_copy_adds_nothing(kernels):
    """Also where the row that stands at its place, row 0, is not finite."""
    copies_MJ = torch.tensor([[0, 1], [-1, 1], [-1, -1]], dtype=torch.int32, device=DEVICE)
    copies_RX = torch.tensor([[NAN], [10.0]], device=DEVICE)
    out_MX, slots_MJ = torch.full((3, 1), NAN, device=DEVICE), torch.full((3, 2), 5.0, device=DEVICE)
    kernels.rows.reduce_rows(copies_RX, copies_MJ, out_MX, 0)
    assert out_MX[1:].flatten().tolist() == [10.0, 0.0]
    assert out_MX[0].isnan().all()
    kernels.rows.collect_values(copies_RX.flatten(), copies_MJ, slots_MJ, 0)
    assert slots_MJ[1:].tolist() == [[0.0, 10.0], [0.0, 0.0]]
    assert slots_MJ[0].isnan().tolist() == [True, False]


# tokens, experts on each rank, experts a token; several blocks of tokens in a chunk, several bins' worth of experts
ROUTINGS = [(1, 1, 1), (7, 2, 3), (300, 5, 4), (700, 16, 8)]


def assert_routed(kernels, ids_TK, num_experts: int, num_ranks: int, num_chunks: int) -> None:
    """Counts, and places on each rank, from ids on the device, against the reference on the CPU."""
    counts_C2P = torch.full((num_chunks, 2, num_ranks), 77, device=DEVICE)
    expected_C2P = torch.empty_like(counts_C2P, device="cpu")
    kernels.routing.count_ids(ids_TK, num_experts // num_ranks, counts_C2P, 5 << 32)
    count_needs(ids_TK.cpu(), num_experts, expected_C2P, 5 << 32)
    assert torch.equal(counts_C2P.cpu(), expected_C2P)
    for rank in range(num_ranks if num_ranks > 1 else 0):
        copies_TJ = torch.full((len(ids_TK), num_ranks - 1), 77, dtype=torch.int32, device=DEVICE)
        kernels.routing.place_copies_of_ids(ids_TK, num_experts // num_ranks, rank, num_chunks, copies_TJ)
        expected_TJ = place_copies(ids_TK.cpu(), num_experts, num_ranks, rank, num_chunks)
        assert torch.equal(copies_TJ.cpu(), expected_TJ)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
@pytest.mark.parametrize(("num_tokens", "num_local", "top_k"), ROUTINGS)
def test_needs_and_places_are_those_of_the_reference(num_tokens, num_local, top_k, num_ranks, dtype, kernels):
    """With one chunk, some, and more than the first batches have tokens."""
    ids_TK = random_ids(num_tokens, num_ranks * num_local, top_k).to(DEVICE, dtype)
    for num_chunks in (1, 3, 12):
        assert_routed(kernels, ids_TK, num_ranks * num_local, num_ranks, num_chunks)


def test_needs_and_places_of_one_sided_ids(kernels):
    """Each token wants the same expert, the last; none wants any; each wants all; ids that do not lie row by row."""
    last = torch.full((200, 1), 23, dtype=torch.int64, device=DEVICE)
    none = torch.full((200, 2), -1, dtype=torch.int32, device=DEVICE)
    everything = torch.arange(24, dtype=torch.int32, device=DEVICE).expand(200, 24)
    across = random_ids(200, 24, 4).to(DEVICE).t().contiguous().t()
    assert not everything.is_contiguous()
    assert not across.is_contiguous()
    for ids_TK in (last, none, everything, across):
        assert_routed(kernels, ids_TK, 24, 3, 2)


def sorted_order(ids_NK, weights_NK, first_expert: int, num_local: int, room: int | None = None) -> Order:
    """By the public function: on the CPU, the reference."""
    num_sorted = int(((ids_NK >= first_expert) & (ids_NK < first_expert + num_local)).sum())
    order = Order.empty(*ids_NK.shape, num_local, num_sorted if room is None else room, weights_NK)
    for tensor in tensors_of(order):
        tensor.fill_(77)
    sort_by_expert(ids_NK, weights_NK, first_expert, order)
    return order.cut(num_sorted)


def tensors_of(order: Order):
    return order.by_expert.copies_MJ, order.groups.ends_e, order.weights_R


# rows, experts of this rank, ranks, experts a row
SORTS = [(1, 1, 1, 1), (300, 5, 1, 3), (129, 64, 2, 8), (50, 130, 1, 4), (200, 1, 3, 3), (2, 16, 8, 40), (700, 9, 2, 8)]


@pytest.mark.parametrize(("num_rows", "num_local", "num_ranks", "top_k"), SORTS)
def test_slots_are_sorted_as_by_the_reference(num_rows, num_local, num_ranks, top_k, kernels):
    """On each rank, with ids and weights in memory of their own, and as columns of a bundle; with room to spare, too."""
    ids_NK = random_ids(num_rows, num_local * num_ranks, top_k, missing=0.2 if num_rows > 1 else 0.0)
    weights_NK = draw(*ids_NK.shape)
    like = [torch.empty(1, 5, dtype=torch.float16), weights_NK, ids_NK]
    bundle_NW = torch.full((num_rows, row_bytes(like)), 255, dtype=torch.uint8, device=DEVICE)
    _, weights_column, ids_column = columns(bundle_NW, like)
    weights_column.copy_(weights_NK)
    ids_column.copy_(ids_NK)
    own = ids_NK.to(DEVICE), weights_NK.to(DEVICE)
    for first_expert in range(0, num_local * num_ranks, num_local):
        expected = tensors_of(sorted_order(ids_NK, weights_NK, first_expert, num_local))
        assert len(expected[2])
        for ids, weights in (own, (own[0].long(), own[1]), (ids_column, weights_column), (ids_column, own[1])):
            *actual, weights_R = (torch.full_like(tensor, 77, device=DEVICE) for tensor in expected)
            kernels.routing.sort_slots(ids, weights, first_expert, *actual, weights_R)
            for one, other in zip((*actual, weights_R), expected, strict=True):
                assert torch.equal(one.cpu(), other)
            roomy_R = torch.full((ids_NK.numel(),), 77.0, device=DEVICE)
            kernels.routing.sort_slots(ids, weights, first_expert, *actual, roomy_R)
            assert torch.equal(roomy_R[: len(weights_R)], weights_R)
            assert (roomy_R[len(weights_R) :] == 77.0).all()


@pytest.mark.parametrize("cells", [4096, 32])
def test_a_program_may_count_several_blocks(cells, kernels, monkeypatch):
    """Since one program adds up what all of them counted; it may look at a few of them at a time."""
    monkeypatch.setattr(kernels.routing, "MOST_SPANS", 3 if cells > 32 else 20)
    monkeypatch.setattr(kernels.routing, "CELLS", cells)
    for num_rows in (48, 49, 300):
        ids_NK, weights_NK = random_ids(num_rows, 12, 8, missing=0.1), draw(num_rows, 8)
        expected = tensors_of(sorted_order(ids_NK, weights_NK, 4, 5))
        actual = [torch.full_like(tensor, 77, device=DEVICE) for tensor in expected]
        kernels.routing.sort_slots(ids_NK.to(DEVICE), weights_NK.to(DEVICE), 4, *actual)
        for one, other in zip(actual, expected, strict=True):
            assert torch.equal(one.cpu(), other)


def test_a_descriptor_is_what_tritons_own_constructor_makes(kernels):
    from triton.tools.tensor_descriptor import TensorDescriptor

    from lightning_moe.ops.kernels.descriptors import tiles

    tensor = draw(4, 16, 32).to(DEVICE)
    made = tiles(tensor, [1, 8, 16])
    theirs = TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [1, 8, 16])
    assert made.base is theirs.base
    for field in fields(TensorDescriptor):
        assert field.name == "base" or getattr(made, field.name) == getattr(theirs, field.name)


def test_no_slot_may_be_of_this_rank(kernels):
    for missing in (torch.full((300, 2), -1).int(), torch.tensor([3, 16]).int().repeat(300, 1)):
        copies_NK = torch.full((300, 2), 77, dtype=torch.int32, device=DEVICE)
        ends_e, weights_R = (
            torch.full((8,), 77, dtype=torch.int32, device=DEVICE),
            torch.full((600,), 77.0, device=DEVICE),
        )
        kernels.routing.sort_slots(missing.to(DEVICE), draw(300, 2).to(DEVICE), 8, copies_NK, ends_e, weights_R)
        assert (copies_NK == -1).all()
        assert (ends_e == 0).all()
        assert (weights_R == 77.0).all()


def test_one_expert_may_get_every_slot_and_others_none(kernels):
    """The only one, the first, the last and one in between, with other ranks' experts before and after."""
    weights_NK = draw(300, 2)
    for expert in (8, 11, 15):
        ids_NK = torch.tensor([expert, 3]).int().repeat(300, 1)
        actual = [torch.full((300, 2), 77), torch.full((8,), 77), torch.full((300,), NAN)]
        copies_NK, ends_e, weights_R = (
            x.to(DEVICE, dtype) for x, dtype in zip(actual, (torch.int32, torch.int32, torch.float32), strict=True)
        )
        kernels.routing.sort_slots(ids_NK.to(DEVICE), weights_NK.to(DEVICE), 8, copies_NK, ends_e, weights_R)
        assert copies_NK.cpu()[:, 0].tolist() == list(range(300))
        assert (copies_NK.cpu()[:, 1] == -1).all()
        assert ends_e.tolist() == [300 * (8 + e >= expert) for e in range(8)]
        assert torch.equal(weights_R.cpu(), weights_NK[:, 0])


def assert_rounded_once(actual, exact, inner: float = 2.0**-19, floor: float = 1e-30) -> None:
    """Within one rounding to the dtype of ``actual``, and ``inner`` for what precedes it in float32."""
    one_rounding = torch.finfo(actual.dtype).eps / 2 * 1.01
    error = (actual.cpu().double() - exact).abs()
    assert (error <= (one_rounding + inner) * exact.abs() + floor).all()


SHAPES = [(1, 1), (7, 5), (9, 256), (33, 96), (16, 768), (3, 1000)]


def swiglu_inputs(num_rows: int, width: int, dtype):
    gate_up_R2F = draw(num_rows, 2 * width, dtype=dtype) * 3
    return gate_up_R2F, draw(num_rows, seed=1).sigmoid(), draw(num_rows, width, dtype=dtype, seed=2)


def exact_swiglu(gate_up_R2F, weights_R):
    """By the reference in float64."""
    act_RF = gate_up_R2F.new_empty(len(gate_up_R2F), gate_up_R2F.shape[1] // 2, dtype=torch.float64)
    swiglu(gate_up_R2F.double(), weights_R.double(), act_RF)
    return act_RF


def exact_swiglu_backward(grad_RF, gate_up_R2F, weights_R):
    """Likewise."""
    grad_R2F = torch.empty_like(gate_up_R2F, dtype=torch.float64)
    return grad_R2F, swiglu_backward(grad_RF.double(), gate_up_R2F.double(), weights_R.double(), grad_R2F)


def assert_swiglu(kernels, shape, dtype) -> None:
    gate_up_R2F, weights_R, _ = swiglu_inputs(*shape, dtype)
    act_RF = torch.full(shape, NAN, dtype=dtype, device=DEVICE)
    kernels.swiglu.swiglu_rows(gate_up_R2F.to(DEVICE), weights_R.to(DEVICE), act_RF)
    assert_rounded_once(act_RF, exact_swiglu(gate_up_R2F, weights_R), floor=torch.finfo(dtype).tiny)


def assert_swiglu_backward(kernels, shape, dtype, in_place: bool) -> None:
    gate_up_R2F, weights_R, grad_RF = swiglu_inputs(*shape, dtype)
    exact_RF = exact_swiglu(gate_up_R2F, weights_R)
    exact_R2F, exact_R = exact_swiglu_backward(grad_RF, gate_up_R2F, weights_R)

    grad, gate_up, weights = grad_RF.to(DEVICE), gate_up_R2F.to(DEVICE), weights_R.to(DEVICE)
    if in_place:  # where the device is the CPU, `to` made no copy
        grad, gate_up = grad.clone(), gate_up.clone()
    grad_gate_up = gate_up if in_place else torch.full_like(gate_up, NAN)
    act = grad if in_place else torch.full_like(grad, NAN)
    grad_weights = torch.full_like(weights, NAN)
    kernels.swiglu.swiglu_backward_rows(grad, gate_up, weights, grad_gate_up, grad_weights, act)

    floor = max(torch.finfo(dtype).tiny, 2.0**-18)  # silu' crosses zero, where its relative error is not bounded
    assert_rounded_once(grad_gate_up, exact_R2F, floor=floor)
    assert_rounded_once(act, exact_RF, floor=torch.finfo(dtype).tiny)
    size_R = (grad_RF.double() * exact_RF / weights_R.double()[:, None]).abs().sum(1)
    assert ((grad_weights.cpu().double() - exact_R).abs() <= 2.0**-18 * size_R).all()
    if not in_place:
        assert torch.equal(grad.cpu(), grad_RF)
        assert torch.equal(gate_up.cpu(), gate_up_R2F)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_swiglu(shape, dtype, kernels):
    assert_swiglu(kernels, shape, dtype)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_swiglu_backward(shape, dtype, in_place, kernels):
    """Both gradients and the rebuilt activation, in buffers of their own and over the inputs."""
    assert_swiglu_backward(kernels, shape, dtype, in_place)


def test_swiglu_backward_without_the_activation_is_the_same_bits(kernels):
    gate_up, weights, grad = (x.to(DEVICE) for x in swiglu_inputs(9, 40, torch.bfloat16))
    results = []
    for act in (None, torch.empty_like(grad)):
        grad_gate_up, grad_weights = torch.full_like(gate_up, NAN), torch.full_like(weights, NAN)
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
    return grad_RM, rows_RN, Groups(sum(counts), torch.tensor(counts).cumsum(0).int())


def assert_weight_gradient(kernels, counts, sides, dtype, total: str, place=lambda tensor: tensor.to(DEVICE)) -> None:
    """Written, added to in place, or going on from a total, scaled and converted, within the rounding of its sums."""
    grad_RM, rows_RN, groups = operands(counts, *sides, dtype)
    num_experts = len(counts[0])
    before_eMN = draw(num_experts, *sides, seed=2)
    out_eMN = torch.full(before_eMN.shape, NAN, dtype=dtype if total == "read" else torch.float32, device=DEVICE)
    total_eMN, scale = None, 1.0
    if total == "in place":
        total_eMN = out_eMN.copy_(before_eMN)
    elif total == "read":
        total_eMN, scale = place(before_eMN), 0.3
    kernels.weight_gradient.weight_gradient_of_experts(
        out_eMN, grad_RM.to(DEVICE), rows_RN.to(DEVICE), place(groups.ends_e), total_eMN, scale
    )
    exact_eMN = torch.zeros_like(before_eMN).double() if total_eMN is None else before_eMN.double()
    size_eMN = exact_eMN.abs()
    for group, rows in enumerate(groups.slices):
        grad_MR, rows_rN = grad_RM[rows].double().t(), rows_RN[rows].double()
        exact_eMN[group % num_experts] += grad_MR @ rows_rN
        size_eMN[group % num_experts] += grad_MR.abs() @ rows_rN.abs()
    info = torch.finfo(out_eMN.dtype)
    rounding_eMN = info.eps / 2 * 1.01 * (exact_eMN * scale).abs().clamp(min=info.tiny)
    bound_eMN = rounding_eMN + max(map(max, counts)) * len(counts) * 2.0**-22 * size_eMN * scale
    assert ((out_eMN.cpu().double() - exact_eMN * scale).abs() <= bound_eMN).all()


@on_hopper
@pytest.mark.parametrize("total", ["none", "in place", "read"])
@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("sides", SIDES, ids=str)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_weight_gradient(counts, sides, dtype, total, kernels):
    """Of one chunk, and of several whose rows lie one after the other."""
    assert_weight_gradient(kernels, counts, sides, dtype, total)


@on_hopper
@pytest.mark.parametrize("sides", SIDES, ids=str)
def test_no_bit_of_a_weight_gradient_depends_on_how_many_chunks_one_product_takes(sides, kernels):
    counts, dtype = [(70, 0, 1), (0, 0, 200), (64, 0, 65), (3, 0, 0)], DTYPES[1]
    grad_RM, rows_RN, groups = operands(counts, *sides, dtype)
    ends = groups.ends_e.view(len(counts), -1)
    gradients = []
    for cuts in ((0, 4), (0, 1, 4), (0, 3, 4), (0, 1, 2, 3, 4)):
        total_eMN = torch.full((3, *sides), NAN, device=DEVICE)
        out_eMN = torch.full((3, *sides), NAN, device=DEVICE, dtype=dtype)
        for first, stop in itertools.pairwise(cuts):
            start, end = int(ends[first - 1, -1]) if first else 0, int(ends[stop - 1, -1])
            kernels.weight_gradient.weight_gradient_of_experts(
                out_eMN if stop == len(counts) else total_eMN,
                grad_RM[start:end].to(DEVICE),
                rows_RN[start:end].to(DEVICE),
                (ends[first:stop] - start).flatten().to(DEVICE),
                total_eMN if first else None,
                0.3 if stop == len(counts) else 1.0,
            )
        gradients.append(out_eMN)
    assert gradients[0].isfinite().all()
    assert all(torch.equal(gradients[0], other) for other in gradients[1:])


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


def assert_multiplied(kernels, counts, sides, dtype, by_n: bool) -> None:
    """Within the rounding of its sums, whichever way the matrices lie; the row after the last expert's stays as it is."""
    rows_RK, _, groups = operands([counts], sides[0], 16, dtype)
    weight_eKN = draw(len(counts), *sides, dtype=dtype, seed=3)
    weight = weight_eKN.to(DEVICE) if by_n else weight_eKN.mT.contiguous().to(DEVICE).mT
    out_RN = torch.full((len(rows_RK), sides[1]), NAN, dtype=dtype, device=DEVICE)
    out_RN[-1] = 7.0
    kernels.grouped_mm.grouped_mm_of_experts(rows_RK.to(DEVICE), weight, groups.ends_e.to(DEVICE), out_RN)
    assert (out_RN[-1] == 7.0).all()
    assert_products(out_RN, rows_RK, weight_eKN, groups)


def assert_products(out_RN, rows_RK, weight_eKN, groups) -> None:
    for weight_KN, rows in zip(weight_eKN.double(), groups.slices, strict=True):
        exact_rN, size_rN = rows_RK[rows].double() @ weight_KN, rows_RK[rows].double().abs() @ weight_KN.abs()
        info = torch.finfo(out_RN.dtype)
        rounding_rN = info.eps / 2 * 1.01 * exact_rN.abs().clamp(min=info.tiny)
        bound_rN = rounding_rN + rows_RK.shape[1] * 2.0**-22 * size_rN
        assert ((out_RN[rows].cpu().double() - exact_rN).abs() <= bound_rN).all()


def assert_gate_up(kernels, counts, sides, dtype, place=lambda tensor: tensor.to(DEVICE)) -> None:
    """The activation is that of gate and up as they are written, and the same bits where they are not."""
    hidden, width = sides
    rows_RH, _, groups = operands([counts], hidden, 16, dtype)
    num_rows = len(rows_RH)
    gate_up_e2FH = draw(len(counts), 2 * width, hidden, dtype=dtype, seed=3) / hidden**0.5
    weights_R = draw(num_rows, seed=4).sigmoid()
    gate_up_R2F = torch.full((num_rows, 2 * width), NAN, dtype=dtype, device=DEVICE)
    act_RF, other_RF = (torch.full((num_rows, width), NAN, dtype=dtype, device=DEVICE) for _ in range(2))
    for tensor in (gate_up_R2F, act_RF, other_RF):
        tensor[-1] = 7.0
    inputs = rows_RH.to(DEVICE), gate_up_e2FH.to(DEVICE), place(weights_R), place(groups.ends_e)
    kernels.grouped_mm.gate_up_swiglu_of_experts(*inputs, act_RF, gate_up_R2F)
    kernels.grouped_mm.gate_up_swiglu_of_experts(*inputs, other_RF, None)
    for tensor in (gate_up_R2F, act_RF, other_RF):
        assert (tensor[-1] == 7.0).all()
    assert_products(gate_up_R2F, rows_RH, gate_up_e2FH.mT, groups)
    exact_RF = exact_swiglu(gate_up_R2F[:-1].cpu(), weights_R[:-1])
    assert_rounded_once(act_RF[:-1], exact_RF, floor=torch.finfo(dtype).tiny)
    assert torch.equal(act_RF, other_RF)


# rows of each expert, and the sides of their matrices: less and more than a tile, and parts of it
MULTIPLIED = [(5, 0, 200, 128, 1), (0, 0, 70), (300,), (1, 1, 1, 300, 2, 0, 64, 65, 129)]
PRODUCT_SIDES = [(16, 16), (144, 272), (64, 512), (80, 128)]


@on_hopper
@pytest.mark.parametrize("by_n", [False, True])
@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("sides", PRODUCT_SIDES, ids=str)
@pytest.mark.parametrize("counts", MULTIPLIED, ids=str)
def test_grouped_mm(counts, sides, dtype, by_n, kernels):
    assert_multiplied(kernels, counts, sides, dtype, by_n)


@on_hopper
@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("sides", PRODUCT_SIDES, ids=str)
@pytest.mark.parametrize("counts", MULTIPLIED, ids=str)
def test_gate_up_with_activation(counts, sides, dtype, kernels):
    assert_gate_up(kernels, counts, sides, dtype)


@on_hopper
def test_no_experts_rows_reach_anothers_products(kernels):
    """Neither its rows nor its matrix, though a block of rows spans several experts."""
    rows_RK, _, groups = operands([(70, 70, 70)], 32, 16, torch.float16)
    weight_eKN = draw(3, 32, 48, dtype=torch.float16)
    rows_RK[70:140], weight_eKN[1] = NAN, float("inf")
    out_RN = torch.empty(len(rows_RK), 48, dtype=torch.float16, device=DEVICE)
    kernels.grouped_mm.grouped_mm_of_experts(
        rows_RK.to(DEVICE), weight_eKN.to(DEVICE), groups.ends_e.to(DEVICE), out_RN
    )
    assert out_RN[:70].isfinite().all()
    assert out_RN[140:210].isfinite().all()
    assert out_RN[70:140].isnan().all()


@on_hopper
@pytest.mark.parametrize("seed", range(3 if INTERPRETED else 12))
def test_grouped_mm_in_random_shapes(seed, kernels):
    rng = random.Random(seed)
    counts = [rng.choice([0, 1, rng.randint(0, 400)]) for _ in range(rng.randint(1, 9))]
    counts = (*counts, 1 + rng.randint(0, 40))
    sides, dtype = (16 * rng.randint(1, 25), 16 * rng.randint(1, 40)), rng.choice(DTYPES[1:])
    assert_multiplied(kernels, counts, sides, dtype, by_n=bool(seed % 2))
    assert_gate_up(kernels, counts, sides, dtype)


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("seed", range(3 if INTERPRETED else 12))
def test_row_kernels_and_activation_in_random_shapes(seed, dtype, kernels):
    rng = random.Random(seed)
    num_rows, width, max_copies = rng.randint(4, 600), rng.randint(1, 700), rng.randint(1, 10)
    on_cpu = random_map(num_rows, max_copies, missing=rng.choice([0.0, 0.3, 0.6]), seed=seed)
    copies_MJ, num_copies = on_cpu.copies_MJ.to(DEVICE), on_cpu.num_copies
    source_MX, copies_RX, values_R = draw(num_rows, width), draw(num_copies, width, seed=1), draw(num_copies, seed=2)
    source_MX, copies_RX, values_R = (tensor.to(dtype) for tensor in (source_MX, copies_RX, values_R))
    before_MX, before_MJ = draw(num_rows, width, dtype=dtype, seed=3), draw(num_rows, max_copies, dtype=dtype, seed=4)
    gathering, reducing, collecting = (
        Bundle(n, x, dtype) for n, x in ((num_copies, width), (num_rows, width), (num_rows, max_copies))
    )
    num_summed = rng.randint(0, num_rows)
    reducing.out_NX[:num_summed] = before_MX[:num_summed].to(DEVICE)
    collecting.out_NX[:num_summed] = before_MJ[:num_summed].to(DEVICE)
    kernels.rows.gather_rows(source_MX.to(DEVICE), copies_MJ, gathering.out_NX)
    kernels.rows.reduce_rows(copies_RX.to(DEVICE), copies_MJ, reducing.out_NX, num_summed)
    kernels.rows.collect_values(values_R.to(DEVICE), copies_MJ, collecting.out_NX, num_summed)
    assert torch.equal(gathering.take(), gathered(source_MX, on_cpu))
    assert torch.equal(reducing.take(), reduced(copies_RX, on_cpu, before_MX, num_summed))
    assert torch.equal(collecting.take(), collected(values_R, on_cpu, before_MJ, num_summed))
    assert_swiglu(kernels, (num_rows, width), dtype)
    assert_swiglu_backward(kernels, (num_rows, width), dtype, in_place=bool(seed % 2))


@pytest.mark.parametrize("seed", range(3 if INTERPRETED else 12))
def test_routing_kernels_in_random_shapes(seed, kernels):
    rng = random.Random(seed)
    num_ranks, num_local, num_chunks = rng.randint(1, 9), rng.randint(1, 40), rng.randint(1, 20)
    num_experts = num_ranks * num_local
    ids_TK = random_ids(rng.randint(1, 1500), num_experts, rng.randint(1, 9), missing=rng.choice([0.0, 0.3]), seed=seed)
    rank = rng.randrange(num_ranks)
    dtype = rng.choice([torch.int32, torch.int64])
    assert_routed(kernels, ids_TK.to(DEVICE, dtype), num_experts, num_ranks, num_chunks)
    weights_TK = draw(*ids_TK.shape)
    expected = tensors_of(sorted_order(ids_TK, weights_TK, rank * num_local, num_local))
    actual = [torch.full_like(tensor, 77, device=DEVICE) for tensor in expected]
    kernels.routing.sort_slots(ids_TK.to(DEVICE), weights_TK.to(DEVICE), rank * num_local, *actual)
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one.cpu(), other)


@on_hopper
@pytest.mark.parametrize("seed", range(3 if INTERPRETED else 12))
def test_weight_gradient_in_random_shapes(seed, kernels):
    rng = random.Random(seed)
    num_chunks, num_experts = rng.randint(1, 4), rng.randint(1, 9)
    counts = [tuple(rng.choice([0, 1, rng.randint(0, 300)]) for _ in range(num_experts)) for _ in range(num_chunks)]
    counts[-1] = (counts[-1][0] + 1, *counts[-1][1:])  # one row at least
    sides = 16 * rng.randint(1, 25), 16 * rng.randint(1, 40)
    total = rng.choice(["none", "in place", "read"])
    assert_weight_gradient(kernels, counts, sides, rng.choice(DTYPES[1:]), total)


# Each of these runs one kernel, or two, over tensors that `place` puts on the device, and compares.


def run_gather(kernels, place, size: int, dtype) -> None:
    row_map, source_MX = random_map(size, 3, missing=0.2), draw(size, 24, dtype=dtype)
    out_RX = place(torch.full((row_map.num_copies, 24), NAN, dtype=dtype))
    kernels.rows.gather_rows(place(source_MX), place(row_map.copies_MJ), out_RX)
    assert torch.equal(out_RX.cpu(), gathered(source_MX, row_map))


def run_reduce(kernels, place, size: int, dtype) -> None:
    row_map, before_MX = random_map(size, 3, missing=0.2), draw(size, 24, dtype=dtype, seed=1)
    copies_RX, out_MX = draw(row_map.num_copies, 24, dtype=dtype), place(before_MX)
    kernels.rows.reduce_rows(place(copies_RX), place(row_map.copies_MJ), out_MX, size // 3)
    assert torch.equal(out_MX.cpu(), reduced(copies_RX, row_map, before_MX, size // 3))


def run_collect(kernels, place, size: int, dtype) -> None:
    row_map, before_MJ = random_map(size, 3, missing=0.2), draw(size, 3, dtype=dtype, seed=1)
    values_R, out_MJ = draw(row_map.num_copies, dtype=dtype), place(before_MJ)
    kernels.rows.collect_values(place(values_R), place(row_map.copies_MJ), out_MJ, size // 3)
    assert torch.equal(out_MJ.cpu(), collected(values_R, row_map, before_MJ, size // 3))


def run_count(kernels, place, size: int, dtype) -> None:
    ids_TK = random_ids(size, 8, 3).to(torch.int64 if dtype == torch.float32 else torch.int32)
    counts_C2P = place(torch.zeros(2, 2, 4, dtype=torch.int32))
    kernels.routing.count_ids(place(ids_TK), 2, counts_C2P, 0)
    expected_C2P = torch.zeros(2, 2, 4, dtype=torch.int32)
    count_needs(ids_TK, 8, expected_C2P)
    assert torch.equal(counts_C2P.cpu(), expected_C2P)


def run_place(kernels, place, size: int, dtype) -> None:
    ids_TK = random_ids(size, 8, 3).to(torch.int64 if dtype == torch.float32 else torch.int32)
    placed_TK, copies_TJ = place(ids_TK), place(torch.full((size, 3), 77, dtype=torch.int32))
    kernels.routing.place_copies_of_ids(placed_TK, 2, size % 4, 2, copies_TJ)
    assert torch.equal(copies_TJ.cpu(), place_copies(ids_TK, 8, 4, size % 4, 2))


def run_sort(kernels, place, size: int, dtype) -> None:
    ids_NK, weights_NK, first_expert = random_ids(size, 48, 24), draw(size, 24), 16 * (size % 3)
    expected = tensors_of(sorted_order(ids_NK, weights_NK, first_expert, 16))
    placed_NK, actual = place(ids_NK), [place(torch.full_like(tensor, 77)) for tensor in expected]
    kernels.routing.sort_slots(placed_NK, place(weights_NK), first_expert, *actual)
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one.cpu(), other)


def run_swiglu(kernels, place, size: int, dtype) -> None:
    gate_up_R2F, weights_R, _ = swiglu_inputs(size, 24, dtype)
    act_RF = place(torch.full((size, 24), NAN, dtype=dtype))
    kernels.swiglu.swiglu_rows(place(gate_up_R2F), place(weights_R), act_RF)
    assert_rounded_once(act_RF, exact_swiglu(gate_up_R2F, weights_R), floor=torch.finfo(dtype).tiny)


def run_swiglu_backward(kernels, place, size: int, dtype) -> None:
    gate_up_R2F, weights_R, grad_RF = swiglu_inputs(size, 24, dtype)
    grad_R2F, grad_R, act_RF = (place(torch.full_like(x, NAN)) for x in (gate_up_R2F, weights_R, grad_RF))
    inputs = place(grad_RF), place(gate_up_R2F), place(weights_R)
    kernels.swiglu.swiglu_backward_rows(*inputs, grad_R2F, grad_R, act_RF)
    exact_R2F, exact_R = exact_swiglu_backward(grad_RF, gate_up_R2F, weights_R)
    assert_rounded_once(grad_R2F, exact_R2F, floor=max(torch.finfo(dtype).tiny, 2.0**-18))
    assert_rounded_once(act_RF, exact_swiglu(gate_up_R2F, weights_R), floor=torch.finfo(dtype).tiny)
    torch.testing.assert_close(grad_R.cpu().double(), exact_R, rtol=1e-5, atol=1e-4)


def run_weight_gradient(kernels, place, size: int, dtype) -> None:
    """Not all is placed: a Hopper GPU's way of reading and writing tiles knows no odd places."""
    assert_weight_gradient(kernels, [(size, 0, 3), (1, size + 5, 0)], (48, 32), dtype, "read", place)


def run_grouped_mm(kernels, place, size: int, dtype) -> None:
    assert_multiplied(kernels, (size, 0, 3, size + 5), (48, 32), dtype, by_n=False)


def run_gate_up(kernels, place, size: int, dtype) -> None:
    """With gate and up, and without."""
    assert_gate_up(kernels, (size, 0, 3, size + 5), (48, 32), dtype, place)


RUNS = [run_gather, run_reduce, run_collect, run_swiglu, run_swiglu_backward, run_count, run_place, run_sort]
NUM_KERNELS = {run_place: 2, run_sort: 2, run_gate_up: 2}
RUNS = [pytest.param(run, id=run.__name__[4:]) for run in RUNS]
HOPPER_RUNS = [run_grouped_mm, run_gate_up, run_weight_gradient]
RUNS += [pytest.param(run, id=run.__name__[4:], marks=on_hopper) for run in HOPPER_RUNS]


class Place:
    """Puts tensors on the device, the one of that number a little beside where memory begins."""

    def __init__(self, odd_one: int | None = None) -> None:
        self.num_placed, self.odd_one = 0, odd_one

    def __call__(self, tensor):
        self.num_placed += 1
        return shifted(tensor) if self.num_placed - 1 == self.odd_one else tensor.to(DEVICE, copy=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("run", RUNS)
def test_any_tensor_may_begin_at_an_odd_element(run, dtype, kernels):
    """Though a kernel for even ones is compiled already, and used again afterwards."""
    if run in HOPPER_RUNS and dtype == torch.float32:
        dtype = torch.float16
    place = Place()
    run(kernels, place, 40, dtype)
    assert place.num_placed or run is run_grouped_mm
    for odd_one in range(place.num_placed):
        run(kernels, Place(odd_one), 40, dtype)
    run(kernels, Place(), 40, dtype)


class Counting:
    """A compiled kernel that counts its launches."""

    def __init__(self, compiled) -> None:
        self.compiled, self.launches = compiled, 0

    def __getattr__(self, name: str):
        return getattr(self.compiled, name)

    def run(self, *args):
        self.launches += 1
        self.compiled.run(*args)


@on_gpu
@pytest.mark.parametrize("run", RUNS)
def test_what_is_compiled_once_serves_all_sizes(run, kernels, monkeypatch):
    """Also sizes that a compiler would like to know about: 1, and multiples of 16; odd tensors are no business of theirs."""
    compiled = {}
    monkeypatch.setattr(kernels.launch, "_compiled", compiled)
    run(kernels, Place(), 40, torch.bfloat16)
    assert len(compiled) == NUM_KERNELS.get(run, 1)
    compiled.update({key: Counting(kernel) for key, kernel in compiled.items()})
    sizes = (1, 2, 3, 16, 17, 48, 401)
    for size in sizes:
        run(kernels, Place(), size, torch.bfloat16)
    assert len(compiled) == NUM_KERNELS.get(run, 1)
    assert [kernel.launches for kernel in compiled.values()] == [len(sizes)] * len(compiled)
    odd = Place(0)  # a tensor that every kernel of the run reads or writes
    run(kernels, odd, 40, torch.bfloat16)
    assert [kernel.launches for kernel in compiled.values()] == [len(sizes) + (not odd.num_placed)] * len(compiled)


@on_gpu
@pytest.mark.parametrize("run", RUNS[:5])
def test_each_dtype_has_its_own_kernel(run, kernels, monkeypatch):
    compiled = {}
    monkeypatch.setattr(kernels.launch, "_compiled", compiled)
    for dtype in (*DTYPES, *DTYPES):
        run(kernels, Place(), 40, dtype)
    assert len(compiled) == len(DTYPES)


def count_calls(monkeypatch, kernels) -> list[str]:
    """The names of the kernels that are called from now on."""
    called = []
    for module, name in [
        (kernels.routing, "count_ids"),
        (kernels.routing, "place_copies_of_ids"),
        (kernels.routing, "sort_slots"),
        (kernels.rows, "gather_rows"),
        (kernels.rows, "reduce_rows"),
        (kernels.rows, "collect_values"),
        (kernels.swiglu, "swiglu_rows"),
        (kernels.swiglu, "swiglu_backward_rows"),
    ]:
        kernel = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, name=name, kernel=kernel: called.append(name) or kernel(*args))
    return called


def by_public_functions(num_rows: int, device: str, dtype):
    """What the public functions make of the same numbers on a device, step by step, in a dict by name."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    ids_NK, weights_NK = random_ids(num_rows, 8, 2), draw(num_rows, 2, dtype=wide)
    counts_C2P = torch.zeros(3, 2, 2, dtype=torch.int64, device=device)
    count_needs(ids_NK.long().to(device), 8, counts_C2P)
    copies_TJ = place_copies(ids_NK.long().to(device), 8, 2, 1, 3)
    order = sorted_order(ids_NK.to(device), weights_NK.to(device), 4, 4, room=ids_NK.numel())
    num_sorted = order.by_expert.num_copies
    gathered_RX = torch.full((num_sorted, 64), NAN, dtype=dtype, device=device)
    gather(draw(num_rows, 64, dtype=dtype).to(device), order.by_expert, gathered_RX)
    out_MX, slots_MJ = (torch.full((num_rows, n), NAN, dtype=dtype, device=device) for n in (64, 2))
    out_MX[: num_rows // 3] = 1.0
    slots_MJ[: num_rows // 3] = 1.0
    reduce(gathered_RX, order.by_expert, out_MX, num_rows // 3)
    collect(gathered_RX[:, 0].contiguous(), order.by_expert, slots_MJ, num_rows // 3)
    gate_up_R2F, weights_R, grad_RF = (x.to(device) for x in swiglu_inputs(num_rows, 24, dtype))
    act_RF, grad_R2F, rebuilt_RF = (torch.full_like(x, NAN) for x in (grad_RF, gate_up_R2F, grad_RF))
    weights_R = weights_R.to(wide)
    swiglu(gate_up_R2F, weights_R, act_RF)
    apart_RF = torch.cat([grad_RF, grad_RF], 1)[:, : grad_RF.shape[1]]  # its rows do not lie one after the other
    grad_R = swiglu_backward(apart_RF, gate_up_R2F, weights_R, grad_R2F, rebuilt_RF)
    exact = [*tensors_of(order), counts_C2P, copies_TJ, gathered_RX, out_MX, slots_MJ]
    return [x.cpu() for x in exact], [x.cpu() for x in (act_RF, rebuilt_RF, grad_R2F, grad_R)]


@on_gpu
@pytest.mark.parametrize("dtype", [torch.float64, *DTYPES], ids=str)
def test_the_public_functions_take_the_kernels_on_a_gpu(dtype, kernels, monkeypatch):
    """And give what the references on the CPU give; float64 and empty inputs, which are no work for a kernel, included."""
    called = count_calls(monkeypatch, kernels)
    for num_rows in (50, 0):
        bitwise, rounded = by_public_functions(num_rows, "cuda", dtype)
        bitwise_cpu, rounded_cpu = by_public_functions(num_rows, "cpu", dtype)
        for one, other in zip(bitwise, bitwise_cpu, strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)
        for one, other in zip(rounded, rounded_cpu, strict=True):
            torch.testing.assert_close(one, other)
    routing, sorting = ["count_ids", "place_copies_of_ids"], ["sort_slots"]
    rest = ["gather_rows", "reduce_rows", "collect_values", "swiglu_rows", "swiglu_backward_rows"]
    assert called == (routing if dtype == torch.float64 else routing + sorting + rest)


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
            groups = Groups(sum(counts), torch.tensor(counts).cumsum(0).int().to(device))
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


def test_operands_whose_columns_lie_together_are_served_by_torch():
    """The kernels take rows side by side; the public operations take any."""
    copies_MJ = torch.tensor([[0, 2], [1, -1]], dtype=torch.int32, device=DEVICE)
    row_map = RowMap(copies_MJ, 3)
    source_MX, copies_RX = torch.randn(2, 64, device=DEVICE), torch.randn(3, 64, device=DEVICE)
    gathered_RX, sums_MX = torch.full((64, 3), NAN, device=DEVICE).t(), torch.full((64, 2), NAN, device=DEVICE).t()
    gather(source_MX, row_map, gathered_RX)
    reduce(copies_RX, row_map, sums_MX)
    assert torch.equal(gathered_RX, source_MX[[0, 1, 0]])
    torch.testing.assert_close(sums_MX, torch.stack([copies_RX[0] + copies_RX[2], copies_RX[1]]))
    ids_NK = torch.tensor([[1, 0], [0, 2], [2, 1]], dtype=torch.int32, device=DEVICE)
    weights_NK = torch.rand(3, 2, device=DEVICE)
    orders = [Order.empty(3, 2, 3, 6, weights_NK) for _ in range(2)]
    sort_by_expert(ids_NK, weights_NK, 0, orders[0])
    sort_by_expert(ids_NK.t().contiguous().t(), weights_NK, 0, orders[1])
    one, other = orders
    assert torch.equal(one.by_expert.copies_MJ, other.by_expert.copies_MJ)
    assert torch.equal(one.weights_R, other.weights_R)
