"""What memory is used for: readings by phase, attributed to their owners, compared over ranks."""

from lightning_moe.memory.meter import PHASES, Meter
from lightning_moe.memory.owners import CATEGORIES, OUTSIDE, TEMPORARY

__all__ = ["CATEGORIES", "OUTSIDE", "PHASES", "TEMPORARY", "Meter"]
