"""Grouped products against one float64 product for each expert, within the rounding that the dtype allows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from lightning_moe.ops.grouped_mm import Groups, grouped_mm, grouped_mm_swiglu, weight_gradient
from lightning_moe.ops.swiglu import swiglu

DTYPES = [torch.float64, torch.float32, torch.bfloat16]
COUNTS = [(5, 0, 7, 1), (0, 0, 13, 0), (0, 0, 0, 0), (3,), (1, 1, 1, 1)]
ALIGNED, UNALIGNED = (32, 24), (5, 3)


def groups_of(counts):
    return Groups(sum(counts), torch.tensor(counts).cumsum(0).int())


def operands(counts, width_in: int, width_out: int, dtype, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    rows_RN = torch.randn(sum(counts), width_in, generator=generator).to(dtype)
    weight_eMN = torch.randn(len(counts), width_out, width_in, generator=generator).to(dtype)
    return rows_RN, weight_eMN, generator


def product(rows_RN, weight_eNM, groups):
    """In a buffer that holds something else before."""
    out_RM = rows_RN.new_full((rows_RN.shape[0], weight_eNM.shape[2]), float("nan"))
    grouped_mm(rows_RN, weight_eNM, groups, out_RM)
    return out_RM


def assert_rounded_once(actual, exact, size, num_terms: int, out_dtype) -> None:
    """``|error|`` of a sum of ``num_terms`` products, summed in float32 (float64), rounded once to ``out_dtype``.

    ``size`` is the sum of the absolute products.
    """
    accumulation = 2.0**-53 if out_dtype == torch.float64 else 2.0**-24
    one_rounding = torch.finfo(out_dtype).eps / 2 * exact.abs() * 1.01
    assert actual.dtype == out_dtype
    assert ((actual.double() - exact).abs() <= one_rounding + (num_terms + 1) * accumulation * size).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("widths", [ALIGNED, UNALIGNED, (8, 12), (12, 8), (3, 32), (32, 3)], ids=str)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_each_expert_multiplies_its_own_rows(counts, widths, dtype):
    """Both with a transposed view, as forward calls it, and with a contiguous tensor, as backward does."""
    rows_RN, weight_eMN, _ = operands(counts, *widths, dtype)
    groups = groups_of(counts)
    exact_RM = torch.cat([rows_RN[r].double() @ w.double().t() for r, w in zip(groups.slices, weight_eMN, strict=True)])
    size_RM = torch.cat(
        [rows_RN[r].double().abs() @ w.double().abs().t() for r, w in zip(groups.slices, weight_eMN, strict=True)]
    )
    for weight_eNM in (weight_eMN.mT, weight_eMN.mT.contiguous()):
        out_RM = product(rows_RN, weight_eNM, groups)
        assert_rounded_once(out_RM, exact_RM, size_RM, widths[0], dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "shape",
    [
        (4, 1, 8),
        (4, 8, 1),
        (4, 1, 1),
        (1, 8, 8),
    ],
    ids=str,
)
def test_operands_of_width_one(shape, dtype):
    """A size of 1 leaves a stride of 1 on both sides, which says nothing about alignment."""
    num_rows, width_in, width_out = shape
    rows_RN, weight_eMN, _ = operands((num_rows, 0), width_in, width_out, dtype)
    exact_RM = rows_RN.double() @ weight_eMN[0].double().t()
    size_RM = rows_RN.double().abs() @ weight_eMN[0].double().abs().t()
    for weight_eNM in (weight_eMN.mT, weight_eMN.mT.contiguous()):
        out_RM = product(rows_RN, weight_eNM, groups_of((num_rows, 0)))
        assert_rounded_once(out_RM, exact_RM, size_RM, width_in, dtype)


@pytest.mark.parametrize(
    ("counts", "widths", "dtype", "expected"),
    [
        ((5, 0, 7), ALIGNED, torch.bfloat16, 1),
        ((5, 0, 7), ALIGNED, torch.float32, 1),
        ((5, 0, 7), (12, 12), torch.float32, 1),
        ((5, 0, 7), (12, 12), torch.bfloat16, 0),  # 24 bytes are no multiple of 16
        ((5, 0, 7), ALIGNED, torch.float64, 0),
        ((0, 0, 0), ALIGNED, torch.bfloat16, 0),
    ],
)
def test_the_native_kernel_is_taken_where_it_serves(counts, widths, dtype, expected, monkeypatch):
    calls = []
    native = F.grouped_mm
    monkeypatch.setattr(F, "grouped_mm", lambda *args, **options: calls.append(1) or native(*args, **options))
    rows_RN, weight_eMN, _ = operands(counts, *widths, dtype)
    product(rows_RN, weight_eMN.mT, groups_of(counts))
    assert len(calls) == expected


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("widths", [ALIGNED, UNALIGNED[::-1]], ids=str)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_the_activation_is_that_of_the_product(counts, widths, dtype, saved):
    """Bit for bit, whether or not the product itself is asked for."""
    hidden, width = widths
    rows_RH, gate_up_e2FH, generator = operands(counts, hidden, 2 * width, dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    weights_R = torch.rand(sum(counts), generator=generator).to(wide)
    act_RF, expected_RF = torch.full((2, sum(counts), width), float("nan"), dtype=dtype).unbind(0)
    gate_up_R2F = torch.full((sum(counts), 2 * width), float("nan"), dtype=dtype) if saved else None
    grouped_mm_swiglu(rows_RH, gate_up_e2FH, weights_R, groups_of(counts), act_RF, gate_up_R2F)
    expected_R2F = product(rows_RH, gate_up_e2FH.mT, groups_of(counts))
    swiglu(expected_R2F, weights_R, expected_RF)
    assert torch.equal(act_RF, expected_RF)
    if gate_up_R2F is not None:
        assert torch.equal(gate_up_R2F, expected_R2F)


def test_products_may_be_rows_of_larger_buffers():
    """As chunks are of one buffer: nothing around them is written, with the native kernel and without."""
    for dtype in (torch.float32, torch.float64):
        rows_RN, weight_eMN, _ = operands((2, 0, 3), 8, 12, dtype)
        around = torch.full((9, 12), -7.0, dtype=dtype)
        grouped_mm(rows_RN, weight_eMN.mT, groups_of((2, 0, 3)), around[2:7])
        assert torch.equal(around[2:7], product(rows_RN, weight_eMN.mT, groups_of((2, 0, 3))))
        around[2:7] = -7.0
        assert (around == -7.0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("widths", [ALIGNED, UNALIGNED], ids=str)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_weight_gradients_are_added_to_what_is_there(counts, widths, dtype):
    rows_RN, weight_eMN, generator = operands(counts, *widths, dtype)
    grad_RM = torch.randn(sum(counts), widths[1], generator=generator).to(dtype)
    total_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    before_eMN = torch.randn(weight_eMN.shape, generator=generator).to(total_dtype)
    total_eMN = before_eMN.clone()
    weight_gradient(total_eMN, grad_RM, rows_RN, groups_of(counts), total_eMN)
    for expert, rows in enumerate(groups_of(counts).slices):
        if rows.start == rows.stop:
            assert torch.equal(total_eMN[expert], before_eMN[expert])
        grad_MR, rows_rN = grad_RM[rows].double().t(), rows_RN[rows].double()
        exact_MN = before_eMN[expert].double() + grad_MR @ rows_rN
        size_MN = before_eMN[expert].double().abs() + grad_MR.abs() @ rows_rN.abs()
        assert_rounded_once(total_eMN[expert], exact_MN, size_MN, sum(counts) + 1, total_dtype)


def test_bf16_gradients_of_many_chunks_are_rounded_once():
    """64 chunks: the float32 total is exact to float32, and converting it costs half a unit of bf16, no more."""
    counts, num_chunks = (3, 0, 4), 64
    total_eMN = torch.zeros(3, 24, 32)
    exact_eMN, size_eMN = torch.zeros(2, 3, 24, 32, dtype=torch.float64).unbind(0)
    for chunk in range(num_chunks):
        rows_RN, _, generator = operands(counts, 32, 24, torch.bfloat16, seed=chunk)
        grad_RM = torch.randn(sum(counts), 24, generator=generator).bfloat16()
        weight_gradient(total_eMN, grad_RM, rows_RN, groups_of(counts), total_eMN)
        for expert, rows in enumerate(groups_of(counts).slices):
            grad_MR, rows_rN = grad_RM[rows].double().t(), rows_RN[rows].double()
            exact_eMN[expert] += grad_MR @ rows_rN
            size_eMN[expert] += grad_MR.abs() @ rows_rN.abs()
    num_terms = num_chunks * sum(counts)
    assert_rounded_once(total_eMN, exact_eMN, size_eMN, num_terms, torch.float32)
    assert_rounded_once(total_eMN.bfloat16(), exact_eMN, size_eMN, num_terms, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("widths", [ALIGNED, UNALIGNED], ids=str)
def test_chunks_in_one_buffer_and_over_totals_give_one_gradient(widths, dtype):
    """Three chunks: written, added and finished with a total; and at once, from one buffer. Then one rounding, and scale."""
    chunks, scale = [(5, 0, 7), (0, 0, 2), (4, 0, 0)], 0.25
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    rows_RN, weight_eMN, generator = operands([sum(map(sum, chunks)), 0, 0], *widths, dtype)
    grad_RM = torch.randn(len(rows_RN), widths[1], generator=generator).to(dtype)
    groups = groups_of([count for chunk in chunks for count in chunk])
    exact_eMN, size_eMN = torch.zeros(2, *weight_eMN.shape, dtype=torch.float64).unbind(0)
    for group, rows in enumerate(groups.slices):
        exact_eMN[group % 3] += scale * grad_RM[rows].double().t() @ rows_RN[rows].double()
        size_eMN[group % 3] += scale * grad_RM[rows].double().abs().t() @ rows_RN[rows].double().abs()

    total_eMN, out_eMN, other_eMN = (torch.full_like(weight_eMN, float("nan"), dtype=t) for t in (wide, dtype, dtype))
    start = 0
    for chunk, counts in enumerate(chunks):
        rows = slice(start, start := start + sum(counts))
        last = chunk == len(chunks) - 1
        target_eMN, so_far_eMN = out_eMN if last else total_eMN, total_eMN if chunk else None
        weight_gradient(target_eMN, grad_RM[rows], rows_RN[rows], groups_of(counts), so_far_eMN, scale if last else 1.0)
    weight_gradient(other_eMN, grad_RM, rows_RN, groups, scale=scale)
    assert_rounded_once(out_eMN, exact_eMN, size_eMN, len(rows_RN) + 3, dtype)
    assert torch.equal(out_eMN, other_eMN)
    assert (out_eMN[1] == 0).all()


def test_groups_know_their_rows():
    assert groups_of((2, 0, 3)).slices == [slice(0, 2), slice(2, 2), slice(2, 5)]
