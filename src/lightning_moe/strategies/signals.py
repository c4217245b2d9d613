"""Signals arrive on every rank at another moment; what they ask for is collective, and has to happen at the same one.

Lightning broadcasts inside its SIGTERM handler, and saves inside its handler for SLURM's requeue signal: in the middle of a
step, where other ranks wait in other collectives. Here handlers only take a note. The ranks compare notes before each batch
of training, in the place of Lightning's own broadcast, and act together.
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from lightning_moe._compat import Callback, CheckpointCallback, SIGTERMException, Trainer, TrainerFn


class Signals:
    """What signals have asked this rank for, and did not get yet."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._connector = trainer._signal_connector
        self._stop = False
        self._requeue = 0  # the signal that asked for it

    @staticmethod
    def attach(trainer: Trainer) -> None:
        """Take the place of the Trainer's handlers, before it registers them."""
        if trainer.world_size == 1:
            return  # nobody to wait for
        signals = Signals(trainer)
        trainer._signal_connector._sigterm_notifier_fn = signals.note_stop  # type: ignore[method-assign]
        trainer._signal_connector._slurm_sigusr_handler_fn = signals.note_requeue  # type: ignore[method-assign]
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = signals.act  # type: ignore[method-assign]
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if _saves_on_exception(callback) and not isinstance(callback.on_exception, partial):
                callback.on_exception = partial(_save_together, callback.on_exception)

    def note_stop(self, signum: int, _: Any) -> None:
        """Handle SIGTERM."""
        launcher = self._trainer.strategy.launcher
        if launcher is not None and not self._stop:
            launcher.kill(signum)  # pass it on to the processes that this one started
        self._stop = True
        if self._trainer.state.fn != TrainerFn.FITTING:
            raise SIGTERMException  # there is nothing to save

    def note_requeue(self, signum: int, _: Any) -> None:
        """Handle the signal by which SLURM announces the end of a job's time."""
        self._requeue = signum

    def act(self) -> None:
        """Do what any rank was asked for; collective over all ranks.

        Raises:
            SIGTERMException: A rank was asked to end.

        """
        asked = torch.tensor([int(self._stop), self._requeue], device=self._trainer.strategy.root_device)
        dist.all_reduce(asked, dist.ReduceOp.MAX)
        stop, requeue = asked.tolist()
        if requeue:
            self._requeue = 0
            type(self._connector)._slurm_sigusr_handler_fn(self._connector, requeue, None)  # type: ignore[arg-type]
        if stop:
            self._connector.received_sigterm = True
            raise SIGTERMException


def _saves_on_exception(callback: Callback) -> bool:
    is_able = isinstance(callback, CheckpointCallback) and type(callback).on_exception is not Callback.on_exception
    return is_able and getattr(callback, "save_on_exception", True)  # `ModelCheckpoint` has the switch


def _save_together(on_exception: Any, trainer: Trainer, module: Any, exception: BaseException) -> None:
    """Let a callback save after an exception that every rank has, and only then: to save is collective."""
    is_shared = isinstance(exception, SIGTERMException) and trainer.state.fn == TrainerFn.FITTING
    if is_shared or trainer.world_size == 1:
        on_exception(trainer, module, exception)
    else:
        callback = type(on_exception.__self__).__name__
        warnings.warn(
            f"`{callback}` saves nothing after {type(exception).__name__}, which other ranks may not have had: they would not"
            " take part. The last checkpoint stands.",
            stacklevel=2,
        )
