"""How tokens are shared out between experts, computed from how many each one got."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def load_imbalance(counts_LE: Tensor) -> Tensor:
    r"""The load of the busiest expert over the mean load, ``[L]``: from 1, even, to E, all on one. 0 where there is no token.

    .. math::

        \frac{\max_i c_i}{\frac{1}{E} \sum_i c_i}

    Args:
        counts_LE: ``[L, E]`` integer, tokens of each expert of L layers.

    """
    mean_L = counts_LE.double().mean(-1)
    return torch.where(mean_L > 0, counts_LE.amax(-1) / mean_L, 0.0).float()


def dead_experts(counts_LE: Tensor) -> Tensor:
    """The number of experts that got no token, ``[L]`` int64."""
    return (counts_LE == 0).sum(-1)


def load_entropy(counts_LE: Tensor) -> Tensor:
    r"""The entropy of the load, over that of an even one, ``[L]``: from 0, all on one expert, to 1, even.

    .. math::

        \frac{-\sum_i p_i \log p_i}{\log E}, \quad p_i = \frac{c_i}{\sum_j c_j}

    """
    num_experts = counts_LE.shape[-1]
    shares_LE = counts_LE.double() / counts_LE.sum(-1, keepdim=True).clamp(min=1)
    entropy_L: Tensor = torch.special.entr(shares_LE).sum(-1)
    return (entropy_L / math.log(max(num_experts, 2))).float()
