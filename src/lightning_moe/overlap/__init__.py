"""ChunkedEP: the routed experts of one layer, with communication hidden behind compute, chunk by chunk."""

from lightning_moe.overlap.function import chunked_experts

__all__ = ["chunked_experts"]
