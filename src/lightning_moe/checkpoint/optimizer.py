"""The state of an optimizer, by the names of the parameters: saved state finds its parameters in any order and sharding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_moe.checkpoint.names import plain_name
from lightning_moe.checkpoint.shards import copy_part, empty_shard


def names_of(module: nn.Module) -> dict[int, str]:
    """``id`` of each parameter -> its name."""
    return {id(parameter): plain_name(name) for name, parameter in module.named_parameters()}


def owner(optimizer: Optimizer, modules: Mapping[str, nn.Module]) -> nn.Module:
    """The module whose parameters an optimizer trains.

    Raises:
        ValueError: None of the modules has all of them.

    """
    mine = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for module in modules.values():
        if mine <= {id(parameter) for parameter in module.parameters()}:
            return module
    raise ValueError(
        f"The `{type(optimizer).__name__}` trains parameters that are in none of the given models. Pass it together with its"
        " model."
    )


class Match(NamedTuple):
    """What of a saved optimizer belongs to which parameter."""

    groups: list[dict[str, Any]]
    """The saved groups, in the order of the optimizer's own."""
    parameters: dict[Any, Tensor]
    """The saved name or number of each parameter -> the parameter."""


def match_groups(optimizer: Optimizer, module: nn.Module, saved: list[dict[str, Any]]) -> Match:
    """Find an optimizer's parameters in saved groups.

    Args:
        optimizer: The optimizer that they are meant for.
        module: Its model.
        saved: Groups whose ``params`` are names or, as plain optimizers write them, numbers.

    Raises:
        ValueError: The groups hold other parameters, or belong to another kind of optimizer.

    """
    names = names_of(module)
    ours = [{names[id(parameter)]: parameter for parameter in group["params"]} for group in optimizer.param_groups]
    parameters: dict[Any, Tensor] = {name: parameter for group in ours for name, parameter in group.items()}
    groups = saved
    if all(isinstance(key, int) for group in saved for key in group["params"]):
        same = [len(group["params"]) for group in saved] == [len(group) for group in ours]
        numbers = [number for group in saved for number in group["params"]]
        parameters = dict(zip(numbers, parameters.values(), strict=False))
    else:
        by_names = {frozenset(group["params"]): group for group in saved}
        same = all(frozenset(group) in by_names for group in ours)
        groups = [by_names[frozenset(group)] for group in ours] if same else []
    if not same:
        raise ValueError(
            f"The parameter groups are not those of the `{type(optimizer).__name__}` here. Build the optimizer as it was when"
            " the checkpoint was saved, or load without it."
        )
    for mine, theirs in zip(optimizer.param_groups, groups, strict=True):
        if (missing := mine.keys() - theirs.keys()) and (extra := theirs.keys() - mine.keys()):
            raise ValueError(
                f"The optimizer was another one than the `{type(optimizer).__name__}` here: its groups have"
                f" {', '.join(sorted(map(repr, extra)))} and lack {', '.join(sorted(map(repr, missing)))}."
            )
    return Match(groups, parameters)


def empty_state(name: str, parameter: Tensor, size: torch.Size, dtype: torch.dtype) -> Tensor:
    """A tensor to load one entry of a parameter's state into: sharded as the parameter, or a scalar.

    Raises:
        ValueError: It has neither shape.

    """
    if size == parameter.shape:
        return empty_shard(parameter, dtype)
    if size.numel() == 1:
        return torch.empty(size, dtype=dtype)
    raise ValueError(
        f"The optimizer's `{name}` has shape {list(size)}, its parameter {list(parameter.shape)}: only state with one value,"
        " or one for each element, can be loaded."
    )


def shard_state(state: Mapping[str, Any], parameter: Tensor) -> dict[str, Any]:
    """This rank's part of a parameter's whole state. No collective."""
    shards = {}
    for name, value in state.items():
        shards[name] = value
        if isinstance(value, Tensor):
            shards[name] = empty_state(name, parameter, value.shape, value.dtype)
            copy_part(shards[name], value)
    return shards


def restore(optimizer: Optimizer, match: Match, state: Mapping[Any, Any]) -> None:
    """Give an optimizer its groups' settings and its state.

    Args:
        optimizer: Changed in place.
        match: Which saved parameter is which.
        state: Saved name or number of a parameter -> its state, sharded.

    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = {id(parameter): i for i, parameter in enumerate(parameters)}
    groups = [
        saved | {"params": [numbers[id(parameter)] for parameter in mine["params"]]}
        for saved, mine in zip(match.groups, optimizer.param_groups, strict=True)
    ]
    by_number = {numbers[id(match.parameters[name])]: entries for name, entries in state.items()}
    optimizer.load_state_dict({"state": by_number, "param_groups": groups})
