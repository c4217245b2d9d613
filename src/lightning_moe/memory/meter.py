"""Memory by phase of a training step, read where the phases meet; and where training is, in case memory ends there.

It learns of phases from hooks of torch: forward begins where a module that it is attached to is called, backward where a
gradient enters that module's output, the optimizer's part with ``step()``, and with that a step ends. Where several optimizers
train the modules, it ends with the first one's, and the others' counts in the next. Whoever knows better says so by
:meth:`Meter.enter`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from lightning_moe.dispatch.base import Plan
from lightning_moe.layers import GroupedExperts
from lightning_moe.memory.gauge import Gauge, Reading, gauge_of
from lightning_moe.memory.owners import CATEGORIES, OUTSIDE, TEMPORARY, Owners
from lightning_moe.memory.steps import OptimizerSteps
from lightning_moe.overlap.function import watchers
from lightning_moe.recompute.backward import in_backward

PHASES = ("forward", "backward", "optimizer")
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)


class Load(NamedTuple):
    """What one call of routed experts had to do on this rank.

    Args:
        tokens: T, that this rank sent on.
        rows: R, that its experts received, of all ranks, one for each of a token's experts.

    """

    tokens: int
    rows: int


class Meter:
    """Memory of the steps of some modules that train together.

    Args:
        device: Where they are.
        every_n_steps: Every so many steps memory is attributed to its owners; only peaks are read in the others.
        on_step: Is called as a step ends, with its figures if it was one of these.

    Attributes:
        device: As given.
        gauge: Of its memory.
        owners: Whose it is.
        step: Steps that have ended.
        phase: One of :data:`PHASES`, or ``None`` between steps.
        where: The innermost layer that was entered last, ``""`` outside of all.
        loads: Of the routed experts, by name, in the step under way.

    """

    def __init__(
        self, device: torch.device, every_n_steps: int, on_step: Callable[[dict[str, float] | None], None]
    ) -> None:
        self.device = device
        self.gauge: Gauge = gauge_of(device)
        self.owners = Owners(device)
        self.step = 0
        self.phase: str | None = None
        self.where = ""
        self.loads: dict[str, Load] = {}
        self._every_n_steps = every_n_steps
        self._on_step = on_step
        self._figures = dict.fromkeys(self.names, 0.0)
        self._held: dict[str, int] | None = None  # where the phase began
        self._tokens = 0
        self._modules: WeakSet[nn.Module] = WeakSet()
        self._steps = OptimizerSteps()
        self._handles = [
            register_optimizer_step_pre_hook(self._before_optimizer),
            register_optimizer_step_post_hook(self._after_optimizer),
        ]
        watchers.append(self._watch)

    @property
    def names(self) -> list[str]:
        """Of the figures of a step, in bytes but for counts.

        ``<phase>/peak_allocated`` is the sum of all ``<phase>/<category>`` but ``communication``, which lies beside the
        allocator. On a CPU the process's resident memory takes the place of what is allocated.
        """
        used = self.gauge.name
        counts = ["expert_rows"] if used == "rss" else ["expert_rows", "reserved", "alloc_retries", "ooms"]
        peaks = [f"peak_{used}"] if used == "rss" else [f"peak_{used}", "peak_reserved"]
        of_phase = [*peaks, *CATEGORIES, TEMPORARY]
        return [used, *peaks, *counts, *(f"{phase}/{name}" for phase in PHASES for name in of_phase)]

    def attach(self, module: nn.Module, roots: Sequence[nn.Module]) -> None:
        """Follow a module.

        Args:
            module: Whose parameters count, and whose layers are named as in it. A second time it is left as it is.
            roots: The modules in it that are called from outside.

        """
        if module in self._modules:
            return
        self._modules.add(module)
        self.owners.add_module(module)
        self._steps.add_module(module)
        for root in roots:
            self._handles.append(root.register_forward_pre_hook(self._before_root))
            self._handles.append(root.register_forward_hook(self._after_root))
        names = _layers(module)
        for name in names:
            layer, outer = module.get_submodule(name), _outer(name, names)
            self._handles.append(layer.register_forward_pre_hook(partial(self._before_layer, name)))
            self._handles.append(layer.register_forward_hook(partial(self._after_layer, name, outer)))

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Follow an optimizer before its first step, or one that has none of the modules' parameters."""
        self.owners.add_optimizer(optimizer)
        self._steps.add_optimizer(optimizer)

    def detach(self) -> None:
        """Leave no hook behind; a second time there is nothing to do."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._modules.clear()
        if self._watch in watchers:
            watchers.remove(self._watch)

    def enter(self, phase: str | None) -> None:
        """A phase begins, and the one before it has ended; ``None`` is none of them, and nothing is measured."""
        if phase == self.phase:
            return
        if phase == "forward":
            self.where = ""
        self._read(phase)

    def look(self) -> None:
        """Read within a phase: to be called where much is about to be freed."""
        if self.phase is not None:
            self._read(self.phase)

    def _read(self, phase: str | None) -> None:
        reading = self.gauge.read()
        held = self.owners.held(reading.used) if (self.step + 1) % self._every_n_steps == 0 else None
        if self.phase is not None:
            self._record(self.phase, reading, held)
        self.phase, self._held = phase, held

    def _record(self, phase: str, reading: Reading, held: dict[str, int] | None) -> None:
        figures, peak = self._figures, f"peak_{self.gauge.name}"
        figures[self.gauge.name] = reading.used
        counts = {"reserved": reading.reserved, "alloc_retries": reading.alloc_retries, "ooms": reading.ooms}
        figures.update((name, count) for name, count in counts.items() if name in figures)
        if self._held is not None and held is not None and reading.peak > figures[f"{phase}/{peak}"]:
            fuller = max(self._held, held, key=_inside)
            figures.update((f"{phase}/{category}", fuller[category]) for category in CATEGORIES)
            figures[f"{phase}/{TEMPORARY}"] = reading.peak - _inside(fuller)
        for name, highest in ((peak, reading.peak), ("peak_reserved", reading.peak_reserved)):
            for figure in (name, f"{phase}/{name}"):
                if figure in figures:
                    figures[figure] = max(figures[figure], highest)

    def _end_step(self) -> None:
        self.enter(None)
        self.step += 1
        self._figures["expert_rows"] = max((load.rows for load in self.loads.values()), default=0)
        self.loads.clear()
        self.owners.forget_freed()
        figures, due = self._figures, self.step % self._every_n_steps == 0
        # a step's peak counts until it has been told, the phases' figures only in the step that is told of
        untold = {name: value for name, value in figures.items() if name.startswith("peak_") and not due}
        self._figures = dict.fromkeys(figures, 0.0) | untold
        self._on_step(figures if due else None)

    def _before_root(self, *_: Any) -> None:
        if torch.is_grad_enabled() and not in_backward() and self.phase != "forward":
            self.enter("forward")

    def _after_root(self, _module: nn.Module, _args: Any, output: Any) -> None:
        for node in _nodes(output):
            node.register_prehook(lambda _: self.enter("backward"))

    def _before_layer(self, name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        self.where = name
        if isinstance(module, GroupedExperts):
            self._tokens = args[0].shape[0]

    def _after_layer(self, name: str, outer: str, module: nn.Module, _args: Any, output: Any) -> None:
        self.where = outer
        for node in _nodes(output):
            node.register_prehook(partial(self._move, name))
            if isinstance(module, GroupedExperts):  # one node, which ends where the rest of the layer begins
                node.register_hook(partial(self._move, outer))

    def _move(self, name: str, *_: Any) -> None:
        self.where = name

    def _watch(self, plans: Sequence[Plan], kept: Sequence[Tensor]) -> None:
        if self.phase is None:  # an evaluation
            return
        self.loads[self.where] = Load(self._tokens, sum(plan.num_sorted for plan in plans))
        self.owners.keep(kept)

    def _before_optimizer(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._steps.concern(optimizer):
            return
        self.owners.add_optimizer(optimizer)
        if len(args) == 1 and kwargs.get("closure") is None:  # a closure's forward and backward are still to come
            self.enter("optimizer")

    def _after_optimizer(self, optimizer: Optimizer, *_: Any) -> None:
        if not self._steps.concern(optimizer):
            return
        if self._steps.count(optimizer):
            self._end_step()
        else:
            self.enter(None)


def _inside(held: dict[str, int]) -> int:
    return sum(held.values()) - held[OUTSIDE]


def _layers(module: nn.Module) -> list[str]:
    """Names of the items of module lists, and of routed experts."""
    lists = [name for name, child in module.named_modules() if isinstance(child, _CONTAINERS)]
    return [
        name
        for name, child in module.named_modules()
        if isinstance(child, GroupedExperts)
        or (name.rpartition(".")[0] in lists and not isinstance(child, _CONTAINERS) and name)
    ]


def _outer(name: str, names: list[str]) -> str:
    """The innermost of the names that a name lies in."""
    return max((other for other in names if name.startswith(f"{other}.")), key=len, default="")


def _nodes(output: Any) -> list[torch.autograd.graph.Node]:
    """What made the tensors of an output, outside of backward."""
    if in_backward():  # a recomputation: nobody's gradient enters here
        return []
    leaves = [output] if isinstance(output, Tensor) else tree_leaves(output)
    return [leaf.grad_fn for leaf in leaves if isinstance(leaf, Tensor) and leaf.grad_fn is not None]
