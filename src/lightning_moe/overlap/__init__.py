"""ChunkedEP: the routed experts of one layer, with communication hidden behind compute by chunks of tokens."""

from lightning_moe.overlap.function import chunked_experts

__all__ = ["chunked_experts"]
