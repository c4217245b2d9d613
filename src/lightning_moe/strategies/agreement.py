"""Ranks that were given different things say so, by name, before the first collective that would hang on it."""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_moe._version import __version__
from lightning_moe.checkpoint.ranks import gather

_SHOWN = 3  # differences of one kind that a message spells out


@dataclass(frozen=True)
class Facts:
    """What has to be the same on every rank.

    Args:
        what: The kind, as a message names it.
        mend: What to do where ranks differ.
        values: Name -> value, as they are to be shown.

    """

    what: str
    mend: str
    values: Mapping[str, str]

    def digest(self) -> str:
        return hashlib.sha256(repr(list(self.values.items())).encode()).hexdigest()[:16]


def arguments(strategy: Mapping[str, Any], precision: str) -> Facts:
    """What the strategy was built with, and the precision of its Trainer or Fabric."""
    return Facts(
        "arguments",
        "Start every rank with the same arguments: look for a condition on the rank, and for another script or"
        " configuration on one of the hosts.",
        {f"`{name}`": repr(value) for name, value in (*strategy.items(), ("precision", precision))},
    )


def versions() -> Facts:
    """The packages that decide which collectives run."""
    return Facts(
        "package versions",
        "Install the same versions on every host.",
        {"torch": torch.__version__, "lightning": _version_of("lightning"), "lightning_moe": __version__},
    )


def parameters(module: nn.Module) -> Facts:
    """Name, shape, dtype, and whether it is trained, of every parameter, in their order."""
    return Facts(
        "parameters",
        "Build the same model on every rank, from one configuration, and freeze the same parameters.",
        {
            f"`{name}`": f"{tuple(p.shape)} {p.dtype}" + ("" if p.requires_grad else " frozen")
            for name, p in module.named_parameters()
        },
    )


def agree(*facts: Facts) -> None:
    """Raise on every rank if facts differ between ranks. Collective, over all ranks.

    Only digests travel; where these differ, the facts do.

    Raises:
        ValueError: Facts differ; the message says which, what they are on which ranks, and what to do.

    """
    heard = gather([kind.digest() for kind in facts])
    differing = [kind for kind, digests in zip(facts, zip(*heard, strict=True), strict=True) if len(set(digests)) > 1]
    if differing:
        by_kind = zip(*gather([dict(kind.values) for kind in differing]), strict=True)
        lines = [line for kind, values in zip(differing, by_kind, strict=True) for line in _lines(kind, values)]
        raise ValueError("\n".join(["The ranks do not agree, and would wait for each other for ever:", *lines]))


def list_ranks(ranks: list[int]) -> str:
    """Ranks as a message names them.

    >>> list_ranks([3]), list_ranks([0, 2, 3, 4, 6])
    ('rank 3', 'ranks 0, 2-4, 6')

    """
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][-1] == rank - 1:
            spans[-1] = [spans[-1][0], rank]
        else:
            spans.append([rank])
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join("-".join(map(str, span)) for span in spans)


def _lines(kind: Facts, by_rank: tuple[dict[str, str], ...]) -> Iterator[str]:
    names = dict.fromkeys(name for values in by_rank for name in values)
    differing = [name for name in names if len({values.get(name) for values in by_rank}) > 1]
    for name in differing[:_SHOWN]:
        ranks: dict[str, list[int]] = {}
        for rank, values in enumerate(by_rank):
            ranks.setdefault(values.get(name, "missing"), []).append(rank)
        yield f"  {name} is " + " and ".join(f"{value} on {list_ranks(where)}" for value, where in ranks.items())
    if len(differing) > _SHOWN:
        yield f"  and so on: {len(differing)} {kind.what} differ"
    if not differing:
        yield f"  the {kind.what} come in another order"
    yield f"  {kind.mend}"


def _version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
