"""Checkpoints that survive another number of ranks, and Hugging Face's weights in and out."""
