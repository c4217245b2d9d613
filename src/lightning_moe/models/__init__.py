"""Finding the mixture-of-experts blocks of a model and swapping them, family by family."""

from lightning_moe.models.adapters import FAMILIES, Block, swap_blocks

__all__ = ["FAMILIES", "Block", "swap_blocks"]
