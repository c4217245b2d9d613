"""A model in, an expert-parallel model out: mesh, sharding, gradients."""
