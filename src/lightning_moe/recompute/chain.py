"""Parts of a layer that are computed again in backward, one after the other, as they ran in forward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from lightning_moe.recompute.discard import DiscardOutputCheckpoint


class Part(NamedTuple):
    """What is computed again: a method of a module.

    Args:
        name: What a policy calls it.
        module: Its owner.
        method: Called in forward, and again in backward.
        reader: The last module to read the output, which is freed when that has run. ``None`` where only an addition does,
            which does not keep it.

    """

    name: str
    module: nn.Module
    method: str = "forward"
    reader: nn.Module | None = None


class Chain(NamedTuple):
    """Parts in the order in which they run, and the module that runs last: it reads the last output, or is the last part.

    They run again when the gradient of the end's output is known, in the same order: all hooks sit on one tensor, so each part
    finds its arguments, also where these are another one's output.

    Args:
        parts: In order.
        end: The module that runs last.
        exits: Methods of modules whose result may get a gradient beside the end's output, as a router's logits do from an
            auxiliary loss. Where that comes alone, it brings back what has run by then.

    """

    parts: Sequence[Part]
    end: nn.Module
    exits: Sequence[tuple[nn.Module, str]] = ()


class _Run(NamedTuple):
    """A part's call in the forward under way, and the tensors among its arguments and results."""

    checkpoint: DiscardOutputCheckpoint
    inputs: list[Tensor]
    outputs: list[Tensor]


class _Residual:
    """Is kept instead of an argument that is a sum: of what an earlier part was given, and keeps, and of what one returned."""

    def __init__(self, given: Tensor, returned: Tensor, maker: DiscardOutputCheckpoint) -> None:
        self.keeper: Tensor = _Keep.apply(given)  # type: ignore[no-untyped-call]  # without the tensor, its node lets go
        self.returned = returned
        self.maker = maker

    @staticmethod
    def restored(kept: _Residual | Tensor) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        with torch.no_grad():
            (given,) = kept.keeper.grad_fn.saved_tensors  # type: ignore[union-attr]
            total: Tensor = given + kept.returned
        return total.requires_grad_()


class _Keep(torch.autograd.Function):
    """Saves a tensor as autograd saves it for others, so that it goes the way of theirs where it is offloaded, say."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        ctx.save_for_backward(tensor)
        return tensor.new_empty(0)


def recompute(chain: Chain) -> None:
    """Have a chain's parts run again in backward, from now on and for good.

    The methods are replaced on the instances; a module's hooks stay outside, and run once. Where a part's argument is the plain
    sum of what earlier parts were given and returned, such as ``x + attention``, it is added again instead of kept. Under
    ``no_grad`` and for modules in eval mode nothing changes.
    """
    runs: dict[int, _Run] = {}  # by number: where an error ended a forward, the next one overwrites what is left of it
    for number, part in enumerate(chain.parts):
        method = getattr(part.module, part.method)
        setattr(part.module, part.method, _checkpointed(method, part.module, number, runs))
        if part.reader is not None:
            part.reader.register_forward_hook(partial(_discard, number, runs))
    for module, name in chain.exits:
        setattr(module, name, _watched(getattr(module, name), runs))
    chain.end.register_forward_hook(partial(_finish, runs))


def _discard(number: int, runs: dict[int, _Run], *_: Any) -> None:
    if number in runs:
        runs[number].checkpoint.discard_output()


def _finish(runs: dict[int, _Run], _module: nn.Module, _args: Any, output: Any) -> None:
    _bring_back_with(output, runs)
    runs.clear()


def _bring_back_with(result: Any, runs: dict[int, _Run]) -> None:
    checkpoints = [run.checkpoint for run in runs.values()]
    for tensor in _tensors(result):
        register_in_order(checkpoints, tensor)


def register_in_order(checkpoints: Iterable[DiscardOutputCheckpoint], tensor: Tensor) -> None:
    """Register all recompute hooks on one tensor: a part's argument comes back before the part runs again."""
    for checkpoint in checkpoints:
        checkpoint.register_recompute_hook(tensor)


def _checkpointed(
    method: Callable[..., Any], owner: nn.Module, number: int, runs: dict[int, _Run]
) -> Callable[..., Any]:
    @wraps(method)
    def again(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return method(*args, **kwargs)

    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        checkpoint, inputs = DiscardOutputCheckpoint(), _tensors((args, kwargs))
        with _keeping_no_sum(inputs, list(runs.values())):
            result = checkpoint.checkpoint(MethodType(again, owner), args, kwargs)
        runs[number] = _Run(checkpoint, inputs, _tensors(result))
        return result

    return call


def _watched(method: Callable[..., Any], runs: dict[int, _Run]) -> Callable[..., Any]:
    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        _bring_back_with(result, runs)
        return result

    return call


@contextmanager
def _keeping_no_sum(inputs: list[Tensor], runs: list[_Run]) -> Iterator[None]:
    """Keep the summands of an argument instead of it, and free the one that an earlier part returned."""
    residuals = {id(tensor): found for tensor in inputs if (found := _as_residual(tensor, runs)) is not None}
    if not residuals:
        yield
        return
    with saved_tensors_hooks(lambda tensor: residuals.get(id(tensor), tensor), _Residual.restored):
        yield
    for residual in residuals.values():
        residual.maker.discard_output()


def _as_residual(total: Tensor, runs: list[_Run]) -> _Residual | None:
    """What a tensor is the sum of, if it is one: the graph says so."""
    node = total.grad_fn
    if node is None or node.name() != "AddBackward0" or node._saved_alpha != 1:  # type: ignore[attr-defined]
        return None
    given = {_edge(tensor): tensor for run in runs for tensor in run.inputs}
    returned = {_edge(tensor): (tensor, run.checkpoint) for run in runs for tensor in run.outputs}
    for one, other in (node.next_functions, node.next_functions[::-1]):
        if one in given and other in returned:
            return _Residual(given[one], *returned[other])
    return None


def _edge(tensor: Tensor) -> tuple[Any, int]:
    """Where its gradient goes."""
    return tensor.grad_fn, tensor.output_nr


def _tensors(nested: Any) -> list[Tensor]:
    """The tensors in it that an op has made from what requires a gradient."""
    return [leaf for leaf in tree_leaves(nested) if isinstance(leaf, Tensor) and leaf.grad_fn is not None]
