"""The arithmetic of a mixture-of-experts layer, as plain functions on local tensors: no communication, no autograd."""
