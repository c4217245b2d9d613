"""A task whose routers keep a selection bias, and what its routers decided, written down by plain forward hooks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from helpers.decoder import VOCABULARY, Decoder
from lightning_moe import TopKRouter

EXPERTS, TOP_K, LAYERS = 8, 3, 2


def decoder(**options: Any) -> Decoder:
    """Dropout is off, so that a resumed run is the same."""
    model = Decoder(LAYERS, dropout=0.0, **options)
    torch.manual_seed(12)
    for layer in model.layers:
        layer.moe.router = TopKRouter(
            16,
            EXPERTS,
            TOP_K,
            init_std=0.3,
            score_function="sigmoid",
            selection_bias=True,
            num_groups=4,
            top_k_groups=3,
        )
    return model


def batches(rank: int, number: int, seed: int = 0) -> Tensor:
    """``[number, 2, 5]`` token ids of a rank."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return torch.randint(VOCABULARY, (number, 2, 5), generator=generator)


def loader(ids: Tensor) -> DataLoader:
    return DataLoader(list(ids), batch_size=None)


class Task(LightningModule):
    """Trains a decoder by SGD; ``decisions`` are the experts that each forward chose, in order, and whether in training."""

    def __init__(self, fail_at: int | None = None, **options: Any) -> None:
        super().__init__()
        self.model = decoder(**options)
        self.decisions: list[tuple[bool, list[Tensor]]] = []
        self.fail_at = fail_at
        write_down(self.model, self.decisions)

    def training_step(self, ids: Tensor, batch_idx: int) -> Tensor:
        loss = self.model(ids).square().mean()
        if batch_idx == self.fail_at:
            raise RuntimeError("on purpose")
        return loss

    def validation_step(self, ids: Tensor, batch_idx: int) -> None:
        self.model(ids)

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def write_down(model: nn.Module, decisions: list[tuple[bool, list[Tensor]]]) -> None:
    def see(router: nn.Module, _: Any, routing: Any) -> None:
        if router is model.layers[0].moe.router:
            decisions.append((router.training, []))
        decisions[-1][1].append(routing[2])

    for layer in model.layers:
        layer.moe.router.register_forward_hook(see)


def counts(by_rank: Any, training: bool = True) -> Iterator[Tensor]:
    """``[LAYERS, EXPERTS]`` over ranks for each micro-batch in turn, counted one by one."""
    chosen = [[layers for mode, layers in decisions if mode == training] for decisions in by_rank]
    for micro in zip(*chosen, strict=True):
        total = torch.zeros(LAYERS, EXPERTS, dtype=torch.int64)
        for layers in micro:
            for row, ids_TK in enumerate(layers):
                for expert in ids_TK.flatten().tolist():
                    total[row, expert] += 1
        yield total
