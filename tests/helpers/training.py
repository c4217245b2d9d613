"""One training, three ways: plain torch on one process, the Trainer, and Fabric. Same global batches, same result."""

from __future__ import annotations

from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from helpers.models import VOCABULARY, computing_in, full, qwen3_moe
from lightning_moe import ChunkedEPStrategy, total_grad_norm

STEPS = 5
GLOBAL_BATCH = 4
MAX_NORM = 0.3
LEARNING_RATE = 1e-2


def global_batches(accumulate: int, steps: int = STEPS) -> Tensor:
    """Token ids ``[steps, accumulate, GLOBAL_BATCH, 7]``."""
    generator = torch.Generator().manual_seed(3)
    return torch.randint(VOCABULARY, (steps, accumulate, GLOBAL_BATCH, 7), generator=generator)


def my_share(accumulate: int, rank: int, world_size: int, steps: int = STEPS) -> Tensor:
    """One rank's micro-batches ``[steps * accumulate, GLOBAL_BATCH / world_size, 7]``."""
    share = GLOBAL_BATCH // world_size
    return global_batches(accumulate, steps)[:, :, rank * share : (rank + 1) * share].flatten(0, 1)


def train_plainly(accumulate: int) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses, gradient norms and final weights of plain transformers and torch, in float64."""
    model = qwen3_moe().double()
    model.set_experts_implementation("eager")
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE)
    losses, norms = [], []
    with computing_in(torch.float64):
        for micro_batches in global_batches(accumulate):
            optimizer.zero_grad()
            for ids in micro_batches:
                loss = model(input_ids=ids, labels=ids).loss
                (loss / accumulate).backward()
                losses.append(loss.item())
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
            optimizer.step()
    return losses, norms, {name: p.detach() for name, p in model.named_parameters()}


class Task(LightningModule):
    """Trains ``self.model`` on the batches it is given; keeps what the tests compare."""

    def __init__(self, **overrides: Any) -> None:
        super().__init__()
        self.model = qwen3_moe(torch.float32, **overrides)
        self.losses: list[float] = []
        self.norms: list[float] = []

    def training_step(self, ids: Tensor) -> Tensor:
        loss = self.model(input_ids=ids, labels=ids).loss
        self.losses.append(self.all_gather(loss.detach()).mean().item())
        return loss

    def validation_step(self, ids: Tensor) -> None:
        self.log("val_loss", self.model(input_ids=ids, labels=ids).loss, sync_dist=True)

    test_step = validation_step

    def predict_step(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids).logits

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norms.append(total_grad_norm(self.parameters()).item())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), LEARNING_RATE)


def trainer(strategy: Any, world_size: int, **options: Any) -> Trainer:
    """A quiet Trainer that leaves the data as it is."""
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
    }
    defaults = {"accelerator": "cpu", "devices": world_size, "max_epochs": 1, "strategy": strategy}
    return Trainer(**(quiet | defaults | options))


def loader(ids: Tensor) -> DataLoader:
    """Each row of ``ids`` is one batch."""
    return DataLoader(list(ids), batch_size=None)


def train_with_trainer(ep_size: int, world_size: int, accumulate: int) -> Any:
    strategy = ChunkedEPStrategy(expert_parallel_size=ep_size, num_chunks=2)
    runner = trainer(
        strategy,
        world_size,
        precision="64-true",
        accumulate_grad_batches=accumulate,
        gradient_clip_val=MAX_NORM,
    )
    task = Task()
    with computing_in(torch.float64):
        runner.fit(task, loader(my_share(accumulate, runner.global_rank, world_size)))
    return task.losses, task.norms, {name: full(p) for name, p in task.model.named_parameters()}


def train_with_fabric(ep_size: int, world_size: int, accumulate: int) -> Any:
    strategy = ChunkedEPStrategy(expert_parallel_size=ep_size, num_chunks=2)
    fabric = Fabric(accelerator="cpu", devices=world_size, strategy=strategy, precision="64-true")
    fabric.launch()
    model = qwen3_moe(torch.float32)
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), LEARNING_RATE))
    losses, norms = [], []
    with computing_in(torch.float64):
        for i, ids in enumerate(my_share(accumulate, fabric.global_rank, world_size)):
            stepping = (i + 1) % accumulate == 0
            with fabric.no_backward_sync(model, enabled=not stepping):
                loss = model(input_ids=ids, labels=ids).loss
                fabric.backward(loss / accumulate)
            losses.append(fabric.all_reduce(loss.detach()).item())
            if stepping:
                norms.append(fabric.clip_gradients(model, optimizer, max_norm=MAX_NORM).item())
                optimizer.step()
                optimizer.zero_grad()
    return losses, norms, {name: full(p) for name, p in model.module.named_parameters()}
