"""What the routed experts compute, written down without chunks, plans or ranks: the reference of this folder's tests."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

HIDDEN, WIDTH, NUM_EXPERTS, TOP_K = 8, 5, 8, 3


@dataclass
class Case:
    """One rank's inputs and the gradient of its output; the experts' matrices are whole."""

    tokens_TH: Tensor
    weights_TK: Tensor
    ids_TK: Tensor
    grad_TH: Tensor
    gate_up_E2FH: Tensor
    down_EHF: Tensor


def routing(
    num_tokens: int, seed: int, pattern: str = "any", top_k: int = TOP_K, num_experts: int = NUM_EXPERTS
) -> Tensor:
    """Ids ``[T, K]`` without repetition.

    ``any``; ``slots``: some are -1; ``one``: all tokens want one expert, and nothing else; ``few``: experts 0..K-1 get all.
    """
    rng = random.Random(seed)
    few = rng.sample(range(num_experts), top_k)
    rows = []
    for _ in range(num_tokens):
        row = {"one": [1] + [-1] * (top_k - 1), "few": list(range(top_k))}.get(pattern)
        row = list(row) if row else rng.sample(range(num_experts), top_k)
        if pattern == "slots":
            row = [expert if rng.random() < 0.6 and expert != few[0] else -1 for expert in row]
        rng.shuffle(row)
        rows.append(row)
    return torch.tensor(rows, dtype=torch.int64).view(-1, top_k)


def make_case(
    rank: int, num_tokens: int, pattern: str = "any", dtype: torch.dtype = torch.float64, **sizes: int
) -> Case:
    """The same for the same rank and size, wherever it is made."""
    hidden, width = sizes.get("hidden", HIDDEN), sizes.get("width", WIDTH)
    everyones = torch.Generator().manual_seed(5)
    gate_up_E2FH = torch.randn(NUM_EXPERTS, 2 * width, hidden, generator=everyones, dtype=torch.float64).to(dtype)
    down_EHF = torch.randn(NUM_EXPERTS, hidden, width, generator=everyones, dtype=torch.float64).to(dtype)
    own = torch.Generator().manual_seed(1000 + rank)
    tokens_TH, grad_TH = torch.randn(2, num_tokens, hidden, generator=own, dtype=torch.float64).to(dtype).unbind(0)
    weights_TK = torch.rand(num_tokens, TOP_K, generator=own, dtype=torch.float64)
    weights_TK = weights_TK.to(torch.float64 if dtype == torch.float64 else torch.float32)
    return Case(tokens_TH, weights_TK, routing(num_tokens, rank, pattern), grad_TH, gate_up_E2FH, down_EHF)


def dense(tokens_TH: Tensor, weights_TK: Tensor, ids_TK: Tensor, gate_up_E2FH: Tensor, down_EHF: Tensor) -> Tensor:
    """Expert by expert, the weights after the second product, as Hugging Face writes it."""
    out_TH = torch.zeros_like(tokens_TH)
    for expert in range(len(down_EHF)):
        tokens, slots = (ids_TK == expert).nonzero(as_tuple=True)
        gate_RF, up_RF = F.linear(tokens_TH[tokens], gate_up_E2FH[expert]).chunk(2, dim=-1)
        out_RH = F.linear(F.silu(gate_RF) * up_RF, down_EHF[expert])
        out_TH = out_TH.index_add(0, tokens, out_RH * weights_TK[tokens, slots, None])
    return out_TH


def reference(cases: list[Case]) -> tuple[list[Tensor], list[Tensor], list[Tensor], Tensor, Tensor]:
    """Each rank's output, its gradients of tokens and weights, and the matrices' gradients summed over ranks: float64."""
    gate_up_E2FH, down_EHF = _leaf(cases[0].gate_up_E2FH), _leaf(cases[0].down_EHF)
    inputs = [(_leaf(case.tokens_TH), _leaf(case.weights_TK)) for case in cases]
    outs = [dense(*pair, case.ids_TK, gate_up_E2FH, down_EHF) for pair, case in zip(inputs, cases, strict=True)]
    torch.autograd.backward(outs, [case.grad_TH.double() for case in cases])
    tokens, weights = zip(*[(tokens_TH.grad, weights_TK.grad) for tokens_TH, weights_TK in inputs], strict=True)
    return [out.detach() for out in outs], list(tokens), list(weights), gate_up_E2FH.grad, down_EHF.grad


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.double().clone().requires_grad_()
