"""Moving token rows between the ranks of one expert-parallel group."""

from lightning_moe.dispatch.base import Dispatcher, Plan
from lightning_moe.dispatch.local import LocalDispatcher
from lightning_moe.dispatch.select import DISPATCHERS, Choice, select_dispatcher

__all__ = ["DISPATCHERS", "Choice", "Dispatcher", "LocalDispatcher", "Plan", "select_dispatcher"]
