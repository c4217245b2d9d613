"""What the two training scripts share: their arguments, their model's config, and their last words."""

from __future__ import annotations

import argparse
import os
import shlex
import sys

from text import VOCABULARY
from transformers import Qwen3MoeConfig


def parser(description: str | None = None) -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = result.add_argument
    add("--data", metavar="PATH", help="folder of .py and .txt files; by default Python's standard library")
    add("--accelerator", default="cpu", help="cpu or cuda")
    add("--devices", type=int, default=2, help="processes on this machine, one a device")
    add("--num-nodes", type=int, default=1, help="machines")
    add("--precision", default="32-true", help="32-true, bf16-true or bf16-mixed")
    add("--steps", type=int, default=200, help="optimizer steps, those before a resume included")
    add("--batch-size", type=int, default=8, help="windows a process and step")
    add("--window", type=int, default=128, help="bytes in a window")
    add("--learning-rate", type=float, default=2e-3, help="of AdamW")
    add("--expert-parallel-size", type=_int_or_auto, default="auto", help="processes that share one set of experts")
    add("--num-chunks", type=int, default=2, help="chunks of tokens in an MoE layer")
    add("--recompute", default="none", choices=["none", "selective", "full"], help="what backward computes again")
    add("--seed", type=int, default=1, help="of the initial weights")
    add("--checkpoint-dir", metavar="PATH", default="checkpoints", help="where the checkpoint goes")
    add("--resume", metavar="PATH", help="checkpoint to go on from")
    return result


def model_config() -> Qwen3MoeConfig:
    """A small Qwen3-MoE over bytes: 0.95 million parameters, of which a token uses 0.36 million."""
    return Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        norm_topk_prob=True,
        output_router_logits=True,  # adds the load-balancing loss
        tie_word_embeddings=False,
    )


def last_words(validation_loss: float, checkpoint: str, args: argparse.Namespace) -> str:
    """How it went, and the command that trains on, as many steps again."""
    executable = os.path.relpath(sys.executable)
    command = [sys.executable if executable.startswith("..") else executable, sys.argv[0]]
    defaults = vars(parser().parse_args([]))
    for name, value in (vars(args) | {"resume": checkpoint, "steps": 2 * args.steps}).items():
        if value != defaults[name]:
            command += [f"--{name.replace('_', '-')}", str(value)]
    return (
        f"\nvalidation loss  {validation_loss:.3f}, from 5.545 = ln(256) before training"
        f"\ncheckpoint       {checkpoint}"
        f"\nto train on      {shlex.join(command)}"
    )


def _int_or_auto(text: str) -> int | str:
    return text if text == "auto" else int(text)
