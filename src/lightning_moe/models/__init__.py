"""Finding the mixture-of-experts blocks of a model and swapping them, family by family."""

from lightning_moe.models.adapters import FAMILIES, Block, stored_layouts, swap_blocks

__all__ = ["FAMILIES", "Block", "stored_layouts", "swap_blocks"]
