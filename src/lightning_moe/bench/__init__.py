"""``python -m lightning_moe.bench``: what the layer costs on this machine, beside what it could cost at best."""
