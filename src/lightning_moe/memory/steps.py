"""Which optimizers train some modules, and where a step of all of them is counted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from lightning_moe.ops.local import sharded_parameters


class OptimizerSteps:
    """Counts steps of some modules, one for all of their optimizers together.

    A process may step other optimizers as well, of an adversarial input, a probe or a second model, and perhaps on some ranks
    alone. What every rank is to do alike goes by what is counted here.
    """

    def __init__(self) -> None:
        self._modules: WeakSet[nn.Module] = WeakSet()
        self._ours: WeakSet[Optimizer] = WeakSet()
        self._stepped: WeakSet[Any] = WeakSet()  # in the step that was counted last

    def add_module(self, module: nn.Module) -> None:
        """Count the steps of optimizers that have a parameter of it."""
        self._modules.add(module)

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Count its steps, whatever parameters it has: copies in another precision, say."""
        self._ours.add(optimizer)

    def concern(self, optimizer: Any) -> bool:
        """Whether an optimizer trains the modules; what shows no parameters (DeepSpeed's engine) does."""
        if optimizer in self._ours or not isinstance(optimizer, Optimizer):
            return True
        theirs = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if any(id(parameter) in theirs for module in self._modules for parameter in _parameters(module)):
            self._ours.add(optimizer)
        return optimizer in self._ours

    def count(self, optimizer: Any) -> bool:
        """Whether an optimizer's step is a new one: not where others have stepped since its own last, and it had not."""
        is_new = not self._stepped or optimizer in self._stepped
        if is_new:
            self._stepped.clear()
        self._stepped.add(optimizer)
        return is_new


def _parameters(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    for parameter in sharded_parameters(child for child in module.modules() if isinstance(child, FSDPModule)):
        yield parameter.sharded_param  # the optimizer's, while the module shows the gathered one
