"""Checkpoints that survive another number of ranks, and Hugging Face's weights in and out."""

from lightning_moe.checkpoint.from_huggingface import load_huggingface
from lightning_moe.checkpoint.to_huggingface import save_huggingface

__all__ = ["load_huggingface", "save_huggingface"]
