"""A checkpoint that keeps nothing, not even its output.

An ordinary checkpoint does not keep what its function's backward reads, but its output stays: the consumers saved it. Here the
output's memory is freed as well, once the consumers have run, and comes back in backward just before they need it.

The function's graph is the ordinary one, built in forward; only what it saves for backward is left out, and filled in by
running the function once more. So gradients reach parameters, and hooks fire, as without a checkpoint.

References follow the graph, upstream: its nodes hold the :class:`_Region`, which holds neither outputs nor arguments. A
reference the other way would close a cycle through C++, which nothing collects.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, UntypedStorage, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.autograd.graph import increment_version, saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from lightning_moe.recompute.backward import in_backward

Result = TypeVar("Result")


class DiscardOutputCheckpoint:
    """Recomputes a function in backward, and its output with it.

    :meth:`checkpoint` runs the function, :meth:`discard_output` frees its output once the last consumer has run, and
    :meth:`register_recompute_hook` names the tensor whose gradient brings it back. A consumer that saved the output must lie
    upstream of that tensor; where none did, an addition say, the hook may be left out, and the function is run again when its
    own backward begins. Reading the output while it is gone is an error, in forward and in backward. Where nobody holds the
    output any more, it does not come back: the function runs again only as far as its own backward needs it to.

    Under ``no_grad``, for a module in eval mode, and where nothing needs a gradient, ``checkpoint`` just calls the function and
    the other two do nothing. Inside another checkpoint's recomputation, nothing is freed.

    An instance may be used again, in the next layer or micro-batch, say: each backward belongs to the call that it came from.

    .. note::
        All of this belongs on one stream. Where another stream reads the output, wait for it before discarding.

    Example::

        >>> norm, mlp, hidden = nn.LayerNorm(4), nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True)
        >>> checkpoint = DiscardOutputCheckpoint()
        >>> normed = checkpoint.checkpoint(norm, hidden)
        >>> out = mlp(normed)
        >>> checkpoint.discard_output()
        >>> checkpoint.register_recompute_hook(out)
        >>> normed.untyped_storage().nbytes()
        0
        >>> out.sum().backward()

    """

    def __init__(self) -> None:
        self._called = False

    def checkpoint(self, fn: Callable[..., Result], *args: Any) -> Result:
        """Call a function and keep nothing but its arguments.

        Args:
            fn: Called again in backward, under the same autocast state and with the same random state of the CPU and of its
                arguments' devices. It must then do the same again. Outputs that share memory with an argument, or with a
                parameter or buffer of the module that ``fn`` is or is a method of, are never freed, nor are tensors of a
                subclass, such as a DTensor; others must own their memory.
            args: Tensors and anything else, nested or not.

        Returns:
            What ``fn`` returns: a tensor, or tensors and anything else, nested.

        Raises:
            RuntimeError: If ``fn`` changed an argument in place.

        """
        self._called, self._region, self._outputs = True, None, []
        owner = getattr(fn, "__self__", fn)
        module = owner if isinstance(owner, nn.Module) else None
        if not torch.is_grad_enabled() or (module is not None and not module.training):
            return fn(*args)

        tensors = _tensors(args)
        versions = [tensor._version for tensor in tensors]
        region = _Region(fn, args)
        with saved_tensors_hooks(region.pack, region.unpack):
            result = fn(*args)
        if versions != [tensor._version for tensor in tensors]:
            raise RuntimeError(f"{region.name} changed an argument in place, so it cannot be run again in backward.")

        leaves, nest = tree_flatten(result)
        tracked = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if not tracked:
            return result
        exits = _Exit.apply(region, tensors, *(leaves[i] for i in tracked))  # type: ignore[no-untyped-call]
        for i, leaf in zip(tracked, exits, strict=True):
            leaves[i] = leaf
        # in a backward, this is a recomputation by someone else, who needs the values and whose graph will run no hook
        if not in_backward():
            self._region, self._node = region, exits[0].grad_fn
            borrowed = tensors if module is None else [*tensors, *module.parameters(), *module.buffers()]
            storages = {tensor.untyped_storage()._cdata for tensor in borrowed}
            plain = [(i, leaf) for i, leaf in enumerate(leaves) if type(leaf) is Tensor]
            self._outputs = [
                (i, leaf, leaf._version) for i, leaf in plain if leaf.untyped_storage()._cdata not in storages
            ]
            _await_discard(leaf for _, leaf, _ in self._outputs)
        return tree_unflatten(leaves, nest)  # type: ignore[no-any-return]

    def discard_output(self) -> None:
        """Free the output's memory, after the last consumer has read it; a second call does nothing.

        Raises:
            RuntimeError: If the output was changed in place, which no recomputation repeats; or before :meth:`checkpoint`.

        """
        region, outputs = self._current(), self._outputs
        self._outputs = []
        for _, output, _ in outputs:
            _DISCARDABLE.pop(output.untyped_storage()._cdata, None)
        if region is None or not outputs:
            return
        if any(output._version != version for _, output, version in outputs):
            raise RuntimeError(f"The output of {region.name} was changed in place, which running it again would undo.")
        region.discard([(i, output) for i, output, _ in outputs])

    def register_recompute_hook(self, tensor: Tensor) -> None:
        """Bring the output back as soon as a tensor's gradient is known.

        Hooks on one tensor run in the order of registration: where one region's output is another's argument, register the
        former's first. More than one hook does no harm: the first to run does the work.

        Args:
            tensor: Downstream of every consumer that saved the output; inside the FSDP unit that gathers the parameters of
                ``fn``, or that unit's output.

        Raises:
            ValueError: If the tensor needs no gradient, or is a leaf, so that the hook would never run.
            RuntimeError: Before :meth:`checkpoint`.

        """
        region = self._current()
        if region is None:
            return
        if tensor.grad_fn is None:
            raise ValueError(
                "Expected argument `tensor` of `register_recompute_hook` to be computed from what requires a gradient, but it"
                f" is not, so the hook would never run and the output of {region.name} would not come back."
            )
        node = self._node
        # on the tensor's node, not on the tensor: FSDP gathers parameters in a hook on the tensor, and that has to come first
        tensor.grad_fn.register_prehook(lambda _: region.bring_back(node))

    def _current(self) -> _Region | None:
        if not self._called:
            raise RuntimeError(f"There is no output yet: call `{type(self).__name__}.checkpoint(fn, *args)` first.")
        return self._region


def is_discardable(tensor: Tensor) -> bool:
    """Whether a tensor's memory is a checkpoint's output, which ``discard_output()`` may free.

    Whoever saves it for backward leaves it where it is: nobody need keep what comes back by itself.
    """
    return tensor.untyped_storage()._cdata in _DISCARDABLE


# by number, which a weak reference keeps from being given away again
_DISCARDABLE: dict[int, StorageWeakRef] = {}


def _await_discard(outputs: Iterable[Tensor]) -> None:
    for cdata in [cdata for cdata, storage in _DISCARDABLE.items() if storage.expired()]:  # type: ignore[no-untyped-call]
        _DISCARDABLE.pop(cdata, None)
    for output in outputs:
        storage = StorageWeakRef(output.untyped_storage())  # type: ignore[no-untyped-call]
        _DISCARDABLE[storage.cdata] = storage


class _Exit(torch.autograd.Function):
    """Where outputs leave a region in forward, and gradients enter it in backward: at the latest here it is rebuilt.

    Arguments are saved here, so that autograd treats them as ever: hooks of the caller see them, a change in place is noticed,
    and they go when the graph is freed.
    """

    @staticmethod
    def forward(ctx: Any, region: _Region, tensors: list[Tensor], *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        ctx.region = region
        return tuple(output.detach() for output in outputs)  # as they are, autograd would make them views

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.region.enter_backward(ctx)
        return None, None, *grads


class _Discarded(NamedTuple):
    leaf: int  # which leaf of what the function returns
    alias: Tensor  # of the output: its storage and version counter, not its graph
    nbytes: int


class _Region:
    """One call of a function: how to repeat it, and, once it has been repeated, what its backward reads."""

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.fn, self.name = fn, getattr(fn, "__qualname__", type(fn).__name__)
        self.args = tree_map(lambda leaf: _TENSOR if isinstance(leaf, Tensor) else leaf, args)
        self.surroundings = _Surroundings.of(_tensors(args))
        self.saved: list[tuple[torch.Size, torch.dtype]] = []
        self.rebuilt: dict[int, Tensor] | None = None  # waits for the region's backward to begin
        self.unread: dict[int, Tensor] = {}  # what that has yet to read
        self.discarded: list[_Discarded] = []
        self.undo = ExitStack()

    def pack(self, tensor: Tensor) -> int:
        self.saved.append((tensor.shape, tensor.dtype))
        return len(self.saved) - 1

    def unpack(self, index: int) -> Tensor:
        if index not in self.unread:
            raise RuntimeError(
                f"The backward of {self.name} reads what is not there: a Function in it reads `ctx.saved_tensors` twice, or a"
                " tensor left it other than as a result."
            )
        return self.unread.pop(index)

    def discard(self, outputs: list[tuple[int, Tensor]]) -> None:
        for leaf, output in outputs:
            self.discarded.append(_Discarded(leaf, output.detach(), output.untyped_storage().nbytes()))
            output.__class__ = _DiscardedOutput
            self.undo.callback(_readable_again, weakref.ref(output))
        aliases = tuple(gone.alias for gone in self.discarded)
        # a node that saved the output, or a view of it, and reads it too early finds another version: an error, no crash
        self.undo.enter_context(_unsafe_preserve_version_counter(aliases))
        increment_version(aliases)
        for alias in aliases:
            alias.untyped_storage().resize_(0)

    def bring_back(self, node: Any) -> None:
        if self.discarded:
            self.rebuild(node)

    def enter_backward(self, node: Any) -> None:
        if self.rebuilt is None:
            self.rebuild(node)
        self.unread, self.rebuilt = self.rebuilt or {}, None

    def rebuild(self, node: Any) -> None:
        args, again, leaves = self.arguments(node), [], []
        wanted = [gone for gone in self.discarded if self.is_held(gone)]

        def keep(tensor: Tensor) -> Tensor:
            again.append(tensor.detach())
            if len(again) == len(self.saved) and not wanted:
                raise _EnoughError  # what is left of the function would compute an output that nobody reads
            return again[-1]

        with (
            suppress(_EnoughError),
            self.surroundings.restored(),
            torch.enable_grad(),
            saved_tensors_hooks(keep, lambda tensor: tensor),
        ):
            leaves = tree_leaves(self.fn(*args))
        storages = [leaves[gone.leaf].untyped_storage() for gone in wanted]
        del leaves  # with the second graph, so that nothing else uses the storages
        sizes = [storage.nbytes() for storage in storages]
        if sizes != [gone.nbytes for gone in wanted] or self.saved != [(t.shape, t.dtype) for t in again]:
            raise RuntimeError(
                f"{self.name}, run again in backward, did not do the same: tensors differ in number or shape."
            )
        for gone, storage in zip(wanted, storages, strict=True):
            _move(storage, gone.alias.untyped_storage())
        self.undo.close()
        self.discarded, self.rebuilt = [], dict(enumerate(again))

    def is_held(self, gone: _Discarded) -> bool:
        """Whether anybody but this region could still read an output: a consumer that saved it or a view of it, or a caller."""
        storage = gone.alias.untyped_storage()
        own = sum(other.alias.untyped_storage()._cdata == storage._cdata for other in self.discarded)
        return bool(torch._C._storage_Use_Count(storage._cdata) > own + 1)  # the one is `storage` itself

    def arguments(self, node: Any) -> Any:
        try:
            tensors = node.saved_tensors
            if any(type(t) is Tensor and t.numel() and not t.untyped_storage().nbytes() for t in tensors):
                raise RuntimeError("The memory of an argument has been freed.")
        except RuntimeError as error:
            error.add_note(
                f"{self.name} cannot be run again without its arguments. If one is the output of another"
                " `DiscardOutputCheckpoint`, that one's `register_recompute_hook` has to come first."
            )
            raise
        given = (t.detach().requires_grad_(t.requires_grad) for t in tensors)
        return tree_map(lambda leaf: next(given) if leaf is _TENSOR else leaf, self.args)


class _Surroundings(NamedTuple):
    """What a function's result depends on besides its arguments."""

    random: list[tuple[torch.Generator, Tensor]]
    autocast: list[dict[str, Any]]

    @staticmethod
    def of(tensors: Iterable[Tensor]) -> _Surroundings:
        devices = {torch.device("cpu"), *(tensor.device for tensor in tensors if not tensor.is_meta)}
        generators = [
            torch.default_generator if d.type == "cpu" else torch.get_device_module(d).default_generators[d.index]
            for d in devices
        ]
        autocast = [
            {
                "device_type": kind,
                "dtype": torch.get_autocast_dtype(kind),
                "enabled": torch.is_autocast_enabled(kind),
                "cache_enabled": torch.is_autocast_cache_enabled(),
            }
            for kind in {device.type for device in devices}
        ]
        return _Surroundings([(generator, generator.get_state()) for generator in generators], autocast)

    @contextmanager
    def restored(self) -> Iterator[None]:
        with ExitStack() as stack:
            for options in self.autocast:
                stack.enter_context(torch.autocast(**options))
            for generator, state in self.random:
                stack.callback(generator.set_state, generator.get_state())
                generator.set_state(state)
            yield


class _DiscardedOutput(Tensor):
    """The class of an output while it is gone: it can be asked what it is, not what it holds."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        attribute = func.__name__ == "__get__"
        name = func.__self__.__name__ if attribute else func.__name__
        if name in _DESCRIPTIONS or (attribute and name not in _VIEWS):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise RuntimeError(
            f"`{name}` reads an output that has been discarded. Call `discard_output()` after the last consumer; in backward,"
            " the output comes back with the gradient of the tensor that `register_recompute_hook` was given."
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"<discarded output of shape {tuple(self.shape)}>"


class _EnoughError(Exception):
    """Everything that backward reads has been computed."""


_TENSOR = object()  # stands for a tensor among a region's arguments
_DESCRIPTIONS = {"size", "dim", "stride", "numel", "storage_offset", "untyped_storage", "register_hook", "retain_grad"}
_VIEWS = {"T", "mT", "H", "mH", "data", "real", "imag"}


def _readable_again(output: weakref.ref[Tensor]) -> None:
    if (tensor := output()) is not None:
        tensor.__class__ = Tensor


def _move(source: UntypedStorage, target: UntypedStorage) -> None:
    """Give a storage's memory to an empty one, beneath every tensor and view that uses it."""
    if target.nbytes():  # already done for another output in the same storage
        return
    swap = getattr(target, "_swap_data_ptr_", None)  # torch 2.11 has none: it holds both for the time of a copy
    if swap is not None and torch._C._storage_Use_Count(source._cdata) == 1:
        swap(source)
    else:
        target.resize_(source.nbytes())
        target.copy_(source)


def _tensors(nested: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(nested) if isinstance(leaf, Tensor)]
