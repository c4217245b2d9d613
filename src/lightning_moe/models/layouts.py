"""How files store what a model stacks: which tensors there are the parts of one value here.

Models hold the experts of a layer in one tensor. Most files hold a tensor for each expert, and split what is one matrix in
the model; some hold the stacked tensor. A layout lists the parts, a family lists its layouts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

Where = tuple[int | slice, ...]
"""A place in a value: for each dim an index, which the part then lacks as a dim, or a slice with start and stop."""


class Part(NamedTuple):
    """A tensor in a file, and its place in a value of the model."""

    name: str
    where: Where

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that the tensor has in the file."""
        return tuple(index.stop - index.start for index in self.where if isinstance(index, slice))

    def below(self, prefix: str) -> Part:
        """The same part of a value under a longer name."""
        return Part(prefix + self.name, self.where)


Layout = list[Part]
"""The parts of one value: together they are all of it."""


def whole(name: str, shape: torch.Size) -> Layout:
    """The value in one piece."""
    return [Part(name, tuple(slice(0, size) for size in shape))]


def per_expert(prefix: str, names: list[str], shape: torch.Size) -> Layout:
    """A stacked value ``[E, M, N]`` in ``len(names)`` matrices ``[M / len(names), N]`` for each expert.

    Args:
        prefix: What the names begin with, before the number of the expert.
        names: Of the matrices, in the order of their rows in the value.
        shape: ``[E, M, N]``.

    """
    num_experts, rows, columns = shape
    step = rows // len(names)
    return [
        Part(f"{prefix}.{expert}.{name}.weight", (expert, slice(i * step, (i + 1) * step), slice(0, columns)))
        for expert in range(num_experts)
        for i, name in enumerate(names)
    ]
