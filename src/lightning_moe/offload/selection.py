"""From names to the modules whose saved activations are offloaded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import NamedTuple

from torch import nn

from lightning_moe.overlap.kept import NAMES


class NothingToOffloadError(ValueError):
    """A model has nothing of what is to be offloaded."""


class Target(NamedTuple):
    """A module, and which of the named tensors that it keeps are meant; ``None`` for all that it saves, named or not."""

    module: nn.Module
    kept: frozenset[str] | None


def find_targets(model: nn.Module, patterns: Sequence[str] | None) -> list[Target]:
    """The modules that are meant.

    Args:
        model: Where they are.
        patterns: Names as in ``model.named_modules()``, in which ``*`` stands for any one part of a name. Behind a module of
            routed experts, one more part names a tensor that these keep: ``"layers.*.mlp.experts.gate_up"``. ``None`` is the
            items of the model's module lists, which are its layers.

    Returns:
        Each module once, none below another.

    Raises:
        NothingToOffloadError: A pattern fits nothing, or ``None`` found no module list.
        ValueError: A pattern names a tensor that is recomputed.

    """
    if patterns is None:
        layers = list(_items_of_lists(model))
        if not layers:
            raise NothingToOffloadError(
                f"`{type(model).__name__}` has no `nn.ModuleList`, whose items would be its layers. Name the modules whose"
                " activations are to be offloaded: `modules=['encoder.*']`, say."
            )
        return [Target(layer, None) for layer in layers]
    modules = dict(model.named_modules())
    found: dict[str, frozenset[str] | None] = {}
    for pattern in patterns:
        whole = [name for name in modules if _fits(pattern, name)]
        parts = [] if whole else _kept_parts(pattern, modules)
        if not whole and not parts:
            raise NothingToOffloadError(_unknown(pattern, modules))
        found |= dict.fromkeys(whole)
        for name, part in parts:
            if (already := found.get(name, frozenset())) is not None:
                found[name] = already | {part}
    covered = [f"{name}." for name, kept in found.items() if kept is None and name]
    below_root = "" in found and found[""] is None
    return [
        Target(modules[name], kept)
        for name, kept in found.items()
        if not name.startswith(tuple(covered)) and not (below_root and name)
    ]


def _items_of_lists(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield from _items_of_lists(child)


def _fits(pattern: str, name: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _kept_parts(pattern: str, modules: dict[str, nn.Module]) -> list[tuple[str, str]]:
    """Modules that a pattern without its last part fits, each with the tensors that the last part fits."""
    prefix, _, last = pattern.rpartition(".")
    parts = []
    for name, module in modules.items():
        names: tuple[str, ...] | None = getattr(module, "kept_names", None)
        if names is None or not _fits(prefix, name):
            continue
        kept = [(name, part) for part in names if fnmatchcase(part, last)]
        if not kept and any(fnmatchcase(part, last) for part in NAMES):
            here = ", ".join(map(repr, names)) or "nothing"
            raise ValueError(
                f"{pattern!r} names what the recompute policy discards: `{name}` keeps {here} for backward. Offload that, or"
                " choose a policy that keeps more."
            )
        parts += kept
    return parts


def _unknown(pattern: str, modules: dict[str, nn.Module]) -> str:
    names = [name for name in modules if name]
    close = get_close_matches(pattern, names, n=3, cutoff=0.3) or names[:3] or [""]
    return (
        f"Expected argument `modules` to hold names of modules, but {pattern!r} fits none. Names are those of"
        f" `named_modules()`, such as {', '.join(map(repr, close))}; `*` stands for one part of a name, as in `layers.*`."
    )
