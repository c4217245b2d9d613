"""Train a small Qwen3-MoE on text, byte by byte, with expert parallelism through Lightning's Trainer."""

from __future__ import annotations

import time
import warnings
from argparse import Namespace

import torch
from common import last_words, model_config, parser
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import TQDMProgressBar
from text import TrainLoader, windows
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import Qwen3MoeForCausalLM

from lightning_moe import ChunkedEPStrategy


class LanguageModel(LightningModule):
    def __init__(self, args: Namespace) -> None:
        super().__init__()
        self.args = args
        self.train_windows, self.val_windows = windows(args.data, args.window)
        self.model: Qwen3MoeForCausalLM | None = None

    def configure_model(self) -> None:
        if self.model is None:  # Lightning calls this again for every fit, validate, test and predict
            with torch.device("meta"):  # each process allocates only its own shards
                self.model = Qwen3MoeForCausalLM(model_config())

    def train_dataloader(self) -> TrainLoader:
        return TrainLoader(self.train_windows, self.args.batch_size, self.args.steps)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val_windows, self.args.batch_size)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.args.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)

    def on_train_start(self) -> None:
        self.started, self.first_step = time.perf_counter(), self.global_step

    def training_step(self, ids: Tensor, batch_idx: int) -> Tensor:
        loss = self.model(input_ids=ids, labels=ids).loss
        tokens = (self.global_step - self.first_step) * ids.numel() * self.trainer.world_size
        self.log("loss", loss, prog_bar=True)
        self.log("tokens/s", round(tokens / (time.perf_counter() - self.started)), prog_bar=True)
        return loss

    def validation_step(self, ids: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.model(input_ids=ids, labels=ids).loss, prog_bar=True, sync_dist=True)


def main() -> None:
    args = parser(__doc__).parse_args()
    # the data lie in memory, so that workers would not help; Lightning 2.6 uses a name that torch 2.13 deprecates
    warnings.filterwarnings("ignore", message=".*does not have many workers|.*LeafSpec")
    seed_everything(args.seed, verbose=False)
    model = LanguageModel(args)
    strategy = ChunkedEPStrategy(
        expert_parallel_size=args.expert_parallel_size, num_chunks=args.num_chunks, recompute=args.recompute
    )
    trainer = Trainer(
        strategy=strategy,
        accelerator=args.accelerator,
        devices=args.devices,
        num_nodes=args.num_nodes,
        precision=args.precision,
        max_steps=args.steps,
        max_epochs=args.steps,  # never reached: an epoch is a run, or what a resume adds to it
        gradient_clip_val=1.0,
        callbacks=TQDMProgressBar(),
        num_sanity_val_steps=0,
        enable_model_summary=False,
        enable_checkpointing=False,
        logger=False,
    )
    trainer.fit(model, ckpt_path=args.resume)
    if "val_loss" not in trainer.callback_metrics:
        raise SystemExit(f"{args.resume} has {trainer.global_step} steps already: ask for more with `--steps`.")
    checkpoint = f"{args.checkpoint_dir}/trainer-step={trainer.global_step}.ckpt"
    trainer.save_checkpoint(checkpoint, weights_only=False)
    if trainer.is_global_zero:
        print(last_words(trainer.callback_metrics["val_loss"].item(), checkpoint, args))


if __name__ == "__main__":
    main()
