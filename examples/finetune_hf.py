"""Fine-tune a Qwen3-MoE that transformers saved, and save it for transformers again, with Lightning's Trainer.

Without `--base` a small model with random weights is made first, so that nothing need be downloaded. With one, its own
tokenizer reads the text, if it has one.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from common import model_config
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import TQDMProgressBar
from text import TrainLoader, as_bytes, windows
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoTokenizer, Qwen3MoeForCausalLM

from lightning_moe import ChunkedEPStrategy, load_huggingface, save_huggingface

MOST_BYTES = 2**22  # of text that is tokenized


def arguments() -> argparse.Namespace:
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = result.add_argument
    add("--base", metavar="PATH", help="folder with a Qwen3-MoE, as `save_pretrained` or the Hub has it")
    add("--out", metavar="PATH", default="runs/finetuned", help="where the fine-tuned model goes")
    add("--data", metavar="PATH", help="folder of .py and .txt files; by default Python's standard library")
    add("--accelerator", default="cpu", help="cpu or cuda")
    add("--devices", type=int, default=2, help="processes on this machine, one a device")
    add("--precision", default="32-true", help="32-true, bf16-true or bf16-mixed")
    add("--steps", type=int, default=50, help="optimizer steps")
    add("--batch-size", type=int, default=8, help="windows a process and step")
    add("--window", type=int, default=128, help="tokens in a window; without a tokenizer they are bytes")
    add("--learning-rate", type=float, help="of AdamW; by default 1e-5 with a base, else 2e-3")
    return result.parse_args()


def encoder(base: Path) -> Callable[[bytearray], Tensor]:
    """What makes ids of text, as the base does."""
    if not (base / "tokenizer_config.json").exists():
        return as_bytes
    tokenizer = AutoTokenizer.from_pretrained(base)
    return lambda text: torch.tensor(tokenizer(text[:MOST_BYTES].decode(errors="replace"))["input_ids"])


class FineTuning(LightningModule):
    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.args = args
        self.base = Path(args.base or f"{args.out}-base")
        self.train_windows, self.val_windows = windows(args.data, args.window, encoder(self.base))
        self.model: Qwen3MoeForCausalLM | None = None

    def prepare_data(self) -> None:  # on one process
        if self.args.base is None:
            Qwen3MoeForCausalLM(model_config()).save_pretrained(self.base)

    def configure_model(self) -> None:
        if self.model is None:
            with torch.device("meta"):
                self.model = Qwen3MoeForCausalLM(AutoConfig.from_pretrained(self.base))
            load_huggingface(self.model, self.base)  # is read when the model is sharded: each process its own shards

    def train_dataloader(self) -> TrainLoader:
        return TrainLoader(self.train_windows, self.args.batch_size, self.args.steps)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        learning_rate = self.args.learning_rate or (1e-5 if self.args.base else 2e-3)
        return torch.optim.AdamW(self.parameters(), lr=learning_rate)

    def training_step(self, ids: Tensor, batch_idx: int) -> Tensor:
        loss = self.model(input_ids=ids, labels=ids).loss
        self.log("loss", loss, prog_bar=True)
        return loss


def main() -> None:
    args = arguments()
    warnings.filterwarnings("ignore", message=".*does not have many workers|.*LeafSpec")
    seed_everything(1, verbose=False)
    task = FineTuning(args)
    trainer = Trainer(
        strategy=ChunkedEPStrategy(),
        accelerator=args.accelerator,
        devices=args.devices,
        precision=args.precision,
        max_steps=args.steps,
        max_epochs=1,
        gradient_clip_val=1.0,
        callbacks=TQDMProgressBar(),
        enable_model_summary=False,
        enable_checkpointing=False,
        logger=False,
    )
    trainer.fit(task)
    save_huggingface(task.model, args.out)

    (ids,) = DataLoader(task.val_windows, 2, sampler=range(2))
    with torch.no_grad():
        logits = task.model(input_ids=ids.to(task.device)).logits.float().cpu()
    if trainer.is_global_zero:
        plain = Qwen3MoeForCausalLM.from_pretrained(args.out)
        with torch.no_grad():
            expected = plain(input_ids=ids).logits.float()
        difference = (logits - expected).norm() / expected.norm()
        print(
            f"\nbase model            {task.base}"
            f"\nfine-tuned model      {args.out}, {sum(p.numel() for p in plain.parameters()):,} parameters in {plain.dtype}"
            f"\nlogits                differ by {difference:.1e} from plain transformers'"
            f'\nto go on without us   Qwen3MoeForCausalLM.from_pretrained("{args.out}")'
        )


if __name__ == "__main__":
    main()
