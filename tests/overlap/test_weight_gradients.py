"""Summing a weight's gradient over chunks: together, one by one, or the first ones together; the sum is always the same."""

from __future__ import annotations

import pytest
import torch

from lightning_moe.ops.grouped_mm import Groups
from lightning_moe.overlap.gradient_sums import GradientSum, GradientTarget
from lightning_moe.overlap.weight_gradients import ChunkGroups, WeightGradient

SHAPE = (2, 3, 4)
OUTGROWN = 2 * 3 * 4 // (3 + 4) + 1  # rows whose operands are larger than the matrix, in float64


@pytest.mark.parametrize(
    ("rows_of", "together"),
    [
        ([OUTGROWN, 1, 2], 1),
        ([OUTGROWN, 1, 1], 3),  # all of them are no larger than two sums
        ([OUTGROWN - 1, 1, 0, 3], 2),
        ([0, 0, OUTGROWN, 5], 3),
        ([1, 1, 1], 3),
        ([0, 0], 2),
        ([50], 1),
    ],
)
@pytest.mark.parametrize("frugal", [True, False])
@pytest.mark.parametrize("inputs_kept", [True, False])
@pytest.mark.parametrize("added_to", ["nothing", "an earlier sum"])
def test_operands_wait_while_they_are_small_beside_their_sum(rows_of, together, frugal, inputs_kept, added_to):
    """Or, where time counts for more, until they are all there."""
    together = together if frugal else len(rows_of)
    generator = torch.Generator().manual_seed(sum(rows_of))
    earlier_eMN = None if added_to == "nothing" else torch.randn(SHAPE, generator=generator, dtype=torch.float64)
    weight_eMN = torch.empty(SHAPE, dtype=torch.float64)
    chunks = [Groups(rows, torch.tensor([rows // 2, rows], dtype=torch.int32)) for rows in rows_of]
    places = ChunkGroups(chunks).rows
    grads_RM = torch.randn(sum(rows_of), 3, generator=generator, dtype=torch.float64)
    rows_RN = torch.randn(sum(rows_of), 4, generator=generator, dtype=torch.float64)
    held = GradientSum()
    held.total_eMN = None if earlier_eMN is None else earlier_eMN.clone()
    target = GradientTarget(torch.float64, 0.5, held)
    gradient = WeightGradient(weight_eMN, ChunkGroups(chunks), target, rows_RN.clone() if inputs_kept else None, frugal)
    assert gradient.at_once == (frugal and len(rows_of) > 1)
    expected_eMN = torch.zeros_like(weight_eMN) if earlier_eMN is None else earlier_eMN.clone()
    for i, (chunk, place) in enumerate(zip(chunks, places, strict=True)):
        operands = gradient.operands(i)
        waits = len(rows_of) > 1 and i < together and together > 1
        assert [operand is not None for operand in operands] == [waits, waits]
        grad_RM, row_RN = (
            given.clone() if operand is None else operand.copy_(given)
            for operand, given in zip(operands, (grads_RM[place], rows_RN[place]), strict=True)
        )
        was_read = gradient.add(i, grad_RM, row_RN)
        assert was_read == (i + 1 >= together)
        if was_read:  # and may be overwritten
            grad_RM.fill_(float("nan"))
            row_RN.fill_(float("nan"))
        for expert, rows in enumerate(chunk.slices):
            expected_eMN[expert] += grads_RM[place][rows].t() @ rows_RN[place][rows]
    torch.testing.assert_close(gradient.result_eMN, 0.5 * expected_eMN, rtol=1e-12, atol=1e-12)
    assert held.total_eMN is None
