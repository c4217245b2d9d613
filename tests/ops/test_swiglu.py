"""The gated activation against autograd of its definition in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from lightning_moe.ops.swiglu import swiglu, swiglu_backward

DTYPES = [torch.float64, torch.float32, torch.bfloat16]
ROUNDING = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}


def inputs(num_rows: int, width: int, dtype, scale: float = 1.0):
    generator = torch.Generator().manual_seed(num_rows + width)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    gate_up_R2F = (scale * torch.randn(num_rows, 2 * width, generator=generator)).to(dtype)
    weights_R = torch.rand(num_rows, generator=generator).to(wide)
    grad_RF = torch.randn(num_rows, width, generator=generator).to(dtype)
    return gate_up_R2F, weights_R, grad_RF


def by_definition(gate_up_R2F, weights_R, grad_RF):
    """Output and both gradients, by autograd in float64 from the very same (rounded) inputs."""
    gate_up_R2F, weights_R = (x.double().clone().requires_grad_() for x in (gate_up_R2F, weights_R))
    width = grad_RF.shape[1]
    out_RF = F.silu(gate_up_R2F[:, :width]) * gate_up_R2F[:, width:] * weights_R[:, None]
    return out_RF.detach(), *torch.autograd.grad(out_RF, (gate_up_R2F, weights_R), grad_RF.double())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(7, 5), (1, 1), (0, 4), (64, 32)], ids=str)
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_forward_and_backward_round_once(shape, scale, dtype):
    """Each element within one rounding to its dtype; a scale of 30 saturates the logistic function on both sides."""
    gate_up_R2F, weights_R, grad_RF = inputs(*shape, dtype, scale)
    out_RF, grad_gate_up_R2F, grad_weights_R = by_definition(gate_up_R2F, weights_R, grad_RF)
    actual_RF = swiglu(gate_up_R2F, weights_R)
    actual_grad_R2F, actual_grad_R = swiglu_backward(grad_RF, gate_up_R2F, weights_R)
    assert actual_RF.dtype == actual_grad_R2F.dtype == dtype
    assert actual_grad_R.dtype == weights_R.dtype
    assert (actual_RF.shape, actual_grad_R2F.shape, actual_grad_R.shape) == (shape, gate_up_R2F.shape, shape[:1])

    inner = 8 * ROUNDING[weights_R.dtype]  # a handful of operations in float32 (float64)
    one_rounding = 1.01 * ROUNDING[dtype]
    assert ((actual_RF.double() - out_RF).abs() <= (one_rounding + inner) * out_RF.abs() + 1e-30).all()
    # silu'(g) may cancel, so the inner error is measured by the size of its terms
    terms_R2F = (grad_RF.abs() * weights_R[:, None] * (1 + gate_up_R2F[:, : shape[1]].abs())).double().repeat(1, 2)
    terms_R2F[:, : shape[1]] *= gate_up_R2F[:, shape[1] :].double().abs()
    error_R2F = (actual_grad_R2F.double() - grad_gate_up_R2F).abs()
    assert (error_R2F <= one_rounding * grad_gate_up_R2F.abs() + inner * terms_R2F + 1e-30).all()
    terms_R = (
        grad_RF.double() * F.silu(gate_up_R2F[:, : shape[1]].double()) * gate_up_R2F[:, shape[1] :].double()
    ).abs()
    assert ((actual_grad_R.double() - grad_weights_R).abs() <= shape[1] * inner * terms_R.sum(1) + 1e-30).all()


def test_backward_is_the_derivative_of_forward():
    """gradcheck: numerical against hand-written derivatives, of both inputs."""

    class Swiglu(torch.autograd.Function):
        @staticmethod
        def forward(ctx, gate_up_R2F, weights_R):
            ctx.save_for_backward(gate_up_R2F, weights_R)
            return swiglu(gate_up_R2F, weights_R)

        @staticmethod
        def backward(ctx, grad_RF):
            return swiglu_backward(grad_RF, *ctx.saved_tensors)

    gate_up_R2F, weights_R, _ = inputs(4, 3, torch.float64)
    assert torch.autograd.gradcheck(Swiglu.apply, (gate_up_R2F.requires_grad_(), weights_R.requires_grad_()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_backward_rebuilds_the_activation_and_may_overwrite_its_inputs(dtype):
    gate_up_R2F, weights_R, grad_RF = inputs(7, 5, dtype)
    expected_RF, expected = swiglu(gate_up_R2F, weights_R), swiglu_backward(grad_RF, gate_up_R2F, weights_R)
    act_RF = torch.full_like(grad_RF, float("nan"))
    actual = swiglu_backward(grad_RF, gate_up_R2F, weights_R, act_RF=act_RF)
    assert torch.equal(act_RF, expected_RF)
    assert all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))
    actual = swiglu_backward(grad_RF, gate_up_R2F, weights_R, act_RF=grad_RF, grad_gate_up_R2F=gate_up_R2F)
    assert actual[0] is gate_up_R2F
    assert torch.equal(grad_RF, expected_RF)
    assert all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))


def test_extreme_gates_stay_finite():
    gate_up_R2F = torch.tensor([[-200.0, 200.0, 3.0, -2.0], [-1e4, 1e4, 1.0, 1.0]])
    weights_R, grad_RF = torch.tensor([0.3, 0.7]), torch.tensor([[0.5, -1.5], [2.0, 0.25]])
    out_RF, grad_gate_up_R2F, grad_weights_R = by_definition(gate_up_R2F, weights_R, grad_RF)
    torch.testing.assert_close(swiglu(gate_up_R2F, weights_R).double(), out_RF)
    actual_R2F, actual_R = swiglu_backward(grad_RF, gate_up_R2F, weights_R)
    torch.testing.assert_close(actual_R2F.double(), grad_gate_up_R2F)
    torch.testing.assert_close(actual_R.double(), grad_weights_R)
