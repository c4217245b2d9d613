"""Metrics of routing, against counting token by token in plain Python, on one process and over ranks."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torchmetrics import MetricCollection

from helpers.processes import run
from lightning_moe.metrics import DeadExperts, DroppedTokens, LoadEntropy, LoadImbalance, TokensPerExpert

EXPERTS, LAYERS = 6, 3
METRICS = [TokensPerExpert, LoadImbalance, DeadExperts, LoadEntropy, DroppedTokens]


def routings(rank: int):
    """Random ids of some micro-batches of each layer, of uneven sizes; every fifth slot goes nowhere, expert 4 gets none."""
    generator = torch.Generator().manual_seed(rank)
    for size in (7, 0, 12):
        for layer in range(LAYERS):
            ids_TK = torch.randint(-1, EXPERTS, (size + rank, 2), generator=generator)
            yield layer, torch.where(ids_TK == 4, layer, ids_TK)


def counted_plainly(ranks):
    """What the five say, from a dictionary of counts."""
    counts = [Counter() for _ in range(LAYERS)]
    for rank in ranks:
        for layer, ids_TK in routings(rank):
            counts[layer].update(ids_TK.flatten().tolist())
    result = {metric.__name__: [] for metric in METRICS}
    for layer in counts:
        tokens = [layer[e] for e in range(EXPERTS)]
        shares = [n / sum(tokens) for n in tokens if n]
        result["TokensPerExpert"].append(tokens)
        result["LoadImbalance"].append(max(tokens) / (sum(tokens) / EXPERTS))
        result["DeadExperts"].append(tokens.count(0))
        result["LoadEntropy"].append(-sum(p * math.log(p) for p in shares) / math.log(EXPERTS))
        result["DroppedTokens"].append(layer[-1])
    return result


def measured(rank: int):
    collection = MetricCollection([metric(EXPERTS, LAYERS) for metric in METRICS])
    for layer, ids_TK in routings(rank):
        collection.update(ids_TK, layer)
    groups = len(collection.compute_groups)
    return {name: value.tolist() for name, value in collection.compute().items()}, groups


def on_my_rank():
    return measured(dist.get_rank())


def assert_equal(actual, expected):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(torch.tensor(actual[name]), torch.tensor(value), msg=name)


def test_metrics_equal_a_plain_count_and_share_one_state():
    actual, groups = measured(0)
    assert_equal(actual, counted_plainly([0]))
    assert groups == 1
    assert min(actual["DroppedTokens"]) > 0
    assert min(actual["DeadExperts"]) > 0


def test_they_add_up_over_ranks():
    for actual, _ in run(on_my_rank, 2):
        assert_equal(actual, counted_plainly([0, 1]))


def test_extremes_and_resets():
    metric = LoadImbalance(4)
    assert metric.compute() == 0
    metric.update(torch.full((5, 1), 2))
    assert metric.compute() == 4
    entropy = LoadEntropy(4)
    assert entropy(torch.full((5, 1), 2)) == 0
    entropy.reset()
    assert entropy(torch.arange(8).view(4, 2) % 4) == 1
    assert LoadEntropy(1)(torch.zeros(3, 1)) == 0
    metric.reset()
    with torch.inference_mode():
        metric.reset()
        metric.update(torch.tensor([[0, 1]]))
    metric.update(torch.tensor([[0, 2]]))
    assert metric.compute() == 2


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="to be positive integers but got 4 and 0"):
        TokensPerExpert(4, 0)
    with pytest.raises(ValueError, match=r"`layer` to lie in 0\.\.1 but got 2"):
        TokensPerExpert(4, 2).update(torch.zeros(1, 1), 2)
