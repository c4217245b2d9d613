"""Train the small Qwen3-MoE of `train_trainer.py` once under each recompute policy, and compare losses and gradient norms.

The first and the last arm keep everything: what lies between these two is what a run differs from its own repetition by. An arm
that recomputes may differ from the first one by no more than that.
"""

from __future__ import annotations

import warnings
from argparse import Namespace
from typing import Any

import torch
from common import parser
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch.optim import Optimizer
from train_trainer import LanguageModel

from lightning_moe import ChunkedEPStrategy, total_grad_norm
from lightning_moe.bench.processes import environment
from lightning_moe.bench.report import machine, save

REFERENCE = "none"


class Curves(Callback):
    """The loss, a mean over ranks, and the norm of all gradients before they are clipped, step by step."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: Any, *_: Any) -> None:
        self.losses.append(trainer.strategy.reduce(outputs["loss"].double(), reduce_op="mean").item())

    def on_before_optimizer_step(self, trainer: Trainer, module: LightningModule, optimizer: Optimizer) -> None:
        self.norms.append(total_grad_norm(module.parameters()).item())


def train(args: Namespace, recompute: str) -> dict[str, list[float]]:
    """One arm."""
    seed_everything(args.seed, verbose=False)
    model, curves = LanguageModel(args), Curves()
    strategy = ChunkedEPStrategy(
        expert_parallel_size=args.expert_parallel_size, num_chunks=args.num_chunks, recompute=recompute
    )
    trainer = Trainer(
        strategy=strategy,
        accelerator=args.accelerator,
        devices=args.devices,
        num_nodes=args.num_nodes,
        precision=args.precision,
        max_steps=args.steps,
        max_epochs=args.steps,
        gradient_clip_val=1.0,
        limit_val_batches=0,
        callbacks=curves,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        logger=False,
    )
    trainer.fit(model)
    return {"losses": curves.losses, "norms": curves.norms}


def distance(arm: dict[str, list[float]], reference: dict[str, list[float]]) -> dict[str, float]:
    """The largest difference over all steps."""
    return {
        what: max(abs(a - b) for a, b in zip(arm[what], reference[what], strict=True)) for what in ("losses", "norms")
    }


def table(result: dict[str, Any]) -> str:
    lines = [
        f"{len(result['arms'][0]['losses'])} steps, {result['devices']} processes, {result['precision']}; {machine(result)}",
        f"{'arm':<28} {'last loss':>10} {'max |loss - first arm|':>23} {'max |norm - first arm|':>23}",
    ]
    lines += [
        f"{arm['recompute']:<28} {arm['losses'][-1]:>10.5f} {arm['distance']['losses']:>23.3e}"
        f" {arm['distance']['norms']:>23.3e}"
        for arm in result["arms"]
    ]
    return "\n".join(lines)


def chart(result: dict[str, Any], figure: Any) -> None:
    """Both curves of all arms, and how far they are from the first."""
    first, *others = result["arms"]
    figure.set_size_inches(11, 6)
    for line, (what, title) in zip(
        figure.subplots(2, 2), (("losses", "loss"), ("norms", "gradient norm")), strict=True
    ):
        for arm in (first, *others):
            line[0].plot(arm[what], label=arm["recompute"], linewidth=1)
        line[0].set_title(f"{title}, recompute", fontsize=9)
        for arm in others:
            line[1].plot(
                [abs(a - b) for a, b in zip(arm[what], first[what], strict=True)], label=arm["recompute"], linewidth=1
            )
        line[1].set_title(f"{title}: distance from the first arm", fontsize=9)
        for axis in line:
            axis.legend(fontsize=7)
            axis.set_xlabel("step", fontsize=8)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--arms", nargs="+", default=["selective", "full"], help="recompute policies to compare")
    options.add_argument("--out", metavar="PATH", help="folder for the JSON and the chart")
    options.set_defaults(steps=50)
    args = options.parse_args()
    warnings.filterwarnings("ignore", message=".*does not have many workers|.*LeafSpec")
    arms = [{"recompute": name, **train(args, name)} for name in (REFERENCE, *args.arms, REFERENCE)]
    for arm in arms:
        arm["distance"] = distance(arm, arms[0])
    if torch.distributed.get_rank() == 0:
        device = torch.device(args.accelerator, 0) if args.accelerator == "cuda" else torch.device("cpu")
        result = {
            "benchmark": "recompute-arms",
            "precision": args.precision,
            "devices": args.devices,
            "seed": args.seed,
            "environment": environment(device),
            "arms": arms,
        }
        print(table(result))
        save(result, f"recompute-arms-{args.precision}", args.out, chart)


if __name__ == "__main__":
    main()
