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


def forward(gate_up_R2F, weights_R):
    act_RF = gate_up_R2F.new_full((gate_up_R2F.shape[0], gate_up_R2F.shape[1] // 2), float("nan"))
    swiglu(gate_up_R2F, weights_R, act_RF)
    return act_RF


def backward(grad_RF, gate_up_R2F, weights_R, act_RF=None):
    """The two gradients, the first in a buffer that holds something else before."""
    grad_gate_up_R2F = torch.full_like(gate_up_R2F, float("nan"))
    return grad_gate_up_R2F, swiglu_backward(grad_RF, gate_up_R2F, weights_R, grad_gate_up_R2F, act_RF)


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
    actual_RF = forward(gate_up_R2F, weights_R)
    actual_grad_R2F, actual_grad_R = backward(grad_RF, gate_up_R2F, weights_R)
    assert actual_grad_R.dtype == weights_R.dtype
    assert actual_grad_R.shape == shape[:1]

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
            return forward(gate_up_R2F, weights_R)

        @staticmethod
        def backward(ctx, grad_RF):
            return backward(grad_RF, *ctx.saved_tensors)

    gate_up_R2F, weights_R, _ = inputs(4, 3, torch.float64)
    assert torch.autograd.gradcheck(Swiglu.apply, (gate_up_R2F.requires_grad_(), weights_R.requires_grad_()))


@pytest.mark.parametrize("rebuilt", ["no", "beside", "over the gradient"])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_backward_rebuilds_the_activation_and_may_overwrite_its_inputs(dtype, in_place, rebuilt):
    """Bit for bit the same, whatever is written where."""
    gate_up_R2F, weights_R, grad_RF = inputs(7, 5, dtype)
    expected_RF, (expected_R2F, expected_R) = (
        forward(gate_up_R2F, weights_R),
        backward(grad_RF, gate_up_R2F, weights_R),
    )
    given_R2F, given_R, given_RF = gate_up_R2F.clone(), weights_R.clone(), grad_RF.clone()
    target_R2F = gate_up_R2F if in_place else torch.full_like(gate_up_R2F, float("nan"))
    act_RF = {"no": None, "beside": torch.full_like(grad_RF, float("nan")), "over the gradient": grad_RF}[rebuilt]
    actual_R = swiglu_backward(grad_RF, gate_up_R2F, weights_R, target_R2F, act_RF)
    assert torch.equal(target_R2F, expected_R2F)
    assert torch.equal(actual_R, expected_R)
    if act_RF is not None:
        assert torch.equal(act_RF, expected_RF)
    if act_RF is not grad_RF:
        assert torch.equal(grad_RF, given_RF)
    if not in_place:
        assert torch.equal(gate_up_R2F, given_R2F)
    assert torch.equal(weights_R, given_R)


def test_outputs_may_be_rows_of_larger_buffers():
    """As chunks are of one buffer: nothing around them is written."""
    gate_up_R2F, weights_R, grad_RF = inputs(4, 3, torch.float32)
    acts, grads = torch.full((2, 9, 3), -7.0), torch.full((9, 6), -7.0)
    swiglu(gate_up_R2F, weights_R, acts[0, 2:6])
    swiglu_backward(grad_RF, gate_up_R2F, weights_R, grads[2:6], acts[1, 2:6])
    assert torch.equal(acts[0, 2:6], forward(gate_up_R2F, weights_R))
    assert torch.equal(acts[1, 2:6], acts[0, 2:6])
    assert torch.equal(grads[2:6], backward(grad_RF, gate_up_R2F, weights_R)[0])
    acts[:, 2:6], grads[2:6] = -7.0, -7.0
    assert (acts == -7.0).all()
    assert (grads == -7.0).all()


def test_extreme_gates_stay_finite():
    gate_up_R2F = torch.tensor([[-200.0, 200.0, 3.0, -2.0], [-1e4, 1e4, 1.0, 1.0]])
    weights_R, grad_RF = torch.tensor([0.3, 0.7]), torch.tensor([[0.5, -1.5], [2.0, 0.25]])
    out_RF, grad_gate_up_R2F, grad_weights_R = by_definition(gate_up_R2F, weights_R, grad_RF)
    torch.testing.assert_close(forward(gate_up_R2F, weights_R).double(), out_RF)
    actual_R2F, actual_R = backward(grad_RF, gate_up_R2F, weights_R)
    torch.testing.assert_close(actual_R2F.double(), grad_gate_up_R2F)
    torch.testing.assert_close(actual_R.double(), grad_weights_R)
