"""The modules of a model that are sharded as one: its decoder layers and its roots."""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_moe.layers import GroupedExperts, MoELayer

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)


def decoder_layers(root: nn.Module) -> list[nn.Module]:
    """The modules that are gathered and freed as one: items of the module lists in which MoE layers live.

    All items of such a list count, those without experts too.
    """
    layers: list[nn.Module] = []
    _collect_decoder_layers(root, layers)
    return layers


def roots_below(module: nn.Module) -> list[nn.Module]:
    """The roots of a module whose own ``forward`` is not what runs, such as a ``LightningModule``.

    Raises:
        TypeError: It owns parameters itself, which no root would hold, or two roots share one.

    """
    own = [name for name, _ in module.named_parameters(recurse=False)]
    if own:
        raise TypeError(
            f"`{type(module).__name__}` owns the parameters {', '.join(map(repr, own))} directly. Its submodules are sharded,"
            " and it is not: move these parameters into a submodule."
        )
    roots = _call_roots(module)
    owner: dict[int, str] = {}
    for root in roots:
        for name, parameter in root.named_parameters():
            here = f"{type(root).__name__}.{name}"
            if owner.setdefault(id(parameter), here) != here:
                raise TypeError(
                    f"`{owner[id(parameter)]}` and `{here}` are one parameter, in two submodules of `{type(module).__name__}`"
                    " that are sharded apart. Put both under one submodule with a `forward` of its own."
                )
    return roots


def sharded_modules(module: nn.Module) -> list[FSDPModule]:
    """Everything at and below a module that FSDP2 gathers and reduces as one."""
    return [submodule for submodule in module.modules() if isinstance(submodule, FSDPModule)]


def unreplicated_experts(module: nn.Module) -> list[GroupedExperts]:
    """The experts at and below a module that no other rank holds too, so that FSDP2 has nothing to do with them."""
    experts = [submodule for submodule in module.modules() if isinstance(submodule, GroupedExperts)]
    return [one for one in experts if one.gradient_sums is not None]


def _call_roots(module: nn.Module) -> list[nn.Module]:
    """The outermost modules below ``module`` that own parameters and have a ``forward``: containers are looked into."""
    roots = []
    for child in module.children():
        if isinstance(child, _CONTAINERS):
            roots += _call_roots(child)
        elif next(child.parameters(), None) is not None:
            roots.append(child)
    return roots


def _collect_decoder_layers(module: nn.Module, layers: list[nn.Module]) -> None:
    is_list = isinstance(module, (*_CONTAINERS, nn.Sequential))
    for child in module.children():
        if is_list and _has_moe(module) and not isinstance(child, _CONTAINERS):
            if next(child.parameters(), None) is not None and child not in layers:
                layers.append(child)
        elif _has_moe(child):
            _collect_decoder_layers(child, layers)


def _has_moe(module: nn.Module) -> bool:
    return any(isinstance(child, MoELayer) for child in module.modules())
