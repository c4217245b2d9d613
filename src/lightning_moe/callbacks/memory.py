"""Memory of a training by phase and owner, for the Trainer, Fabric, and loops of one's own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from lightning_moe._compat import LightningModule, Trainer, rank_zero_warn
from lightning_moe.callbacks.anywhere import Anywhere, unwrapped
from lightning_moe.memory.meter import Meter
from lightning_moe.memory.out_of_memory import Situation, explain, is_out_of_memory
from lightning_moe.memory.over_ranks import OverRanks
from lightning_moe.memory.summary import summarize
from lightning_moe.memory.timeline import save_timeline
from lightning_moe.ops.local import this_rank

_MOST_ROWS = 2048  # of the history
_MOST_EVENTS = 50_000  # of the allocator, that a snapshot shows; a few KB each


class MemoryMonitor(Anywhere):
    """Logs what memory is used for, and says why it ran out.

    Every ``every_n_steps`` optimizer steps, all loggers are given, in GiB and under ``memory/``, the highest over all ranks and
    its spread (``..._spread``: highest less lowest) of

    * ``allocated`` and ``reserved`` at the end of the step; ``peak_allocated`` and ``peak_reserved`` since the last time;
    * ``alloc_retries`` and ``ooms``, counted from the start of the process, and ``expert_rows``, the rows that the
      experts of a rank had in its fullest layer;
    * for each phase of the step, ``forward``, ``backward`` and ``optimizer``: ``<phase>/peak_allocated``,
      ``<phase>/peak_reserved``, and what the former consists of: ``parameters`` (with buffers and what FSDP2 has gathered),
      ``gradients``, ``optimizer_state``, ``expert_activations`` (what routed experts keep for backward), ``rest`` (other
      activations, above all), and ``temporary``: by how much the peak exceeds what was held at the fuller end of the phase,
      such as the experts' scratch. These are of the rank with the highest peak, and sum to it. ``communication``, the
      buffers of NVLink and DeepEP, lies beside the allocator.

    On a CPU, ``rss``, the process's resident memory, takes the place of what is allocated and reserved. The figures of a step
    are logged when the next one ends, so that with NCCL no host waits for a device or for another rank; gloo, the backend of
    CPUs, waits for all ranks in each step that is logged.

    A step is one of the optimizers that train the model, all of them together; others in the process do not count. With the
    Trainer, figures have the step that Lightning's own metrics have, which begins at 0.

    When memory runs out, the error gets a note that says in which phase and layer, what was largest, how many rows the ranks
    had, and what to change; and each rank to which it happens writes a snapshot for PyTorch's memory viewer
    (https://pytorch.org/memory_viz). At the end the first rank draws a timeline, if matplotlib is installed.

    With the Trainer, ``Trainer(callbacks=[MemoryMonitor()])``. With Fabric and in loops of one's own, :meth:`watch`; or
    ``Fabric(callbacks=[monitor])``, which follows what ``fabric.setup`` sets up, and at the end
    ``fabric.call("on_train_end")`` or ``fabric.call("on_exception", exception=error)``. Outside of the Trainer, backward begins
    for it where the model's output gets a gradient; where the loss is computed outside of the model, call
    ``fabric.call("on_before_backward")`` or ``monitor.on_before_backward()`` before its backward.

    .. note::
        ``torch.cuda.max_memory_allocated`` and its like begin anew with every phase.

    Args:
        every_n_steps: How often figures are logged. Peaks are read in the steps between, too.
        folder: Where the timeline and snapshots are written. With ``None`` neither is.
        record_history: Whether a snapshot, which GPUs alone have, shows not only what memory holds, but who allocated it, and
            what came before. Each allocation then looks up where it was made, which can take a fifth of a step.

    Raises:
        ValueError: An argument is out of its range, or a history is to be recorded without a folder for snapshots.

    """

    def __init__(
        self, every_n_steps: int = 10, folder: str | Path | None = "memory", record_history: bool = False
    ) -> None:
        if not isinstance(every_n_steps, int) or isinstance(every_n_steps, bool) or every_n_steps < 1:
            raise ValueError(
                f"Expected argument `every_n_steps` to be an integer of at least 1 but got {every_n_steps!r}."
            )
        if record_history and folder is None:
            raise ValueError("`record_history=True` needs a `folder` for the snapshots that show the history.")
        self._every_n_steps, self._record_history = every_n_steps, record_history
        self._folder = None if folder is None else Path(folder)
        self._step = 0
        self._history: list[dict[str, float]] = []
        self._meter: Meter | None = None
        self._loggers: Sequence[Any] = ()
        self._trainer: Trainer | None = None
        self._coming: tuple[int, OverRanks] | None = None
        self._rows_by_rank: list[float] = []
        self._recording = False

    # --- the engine: attach, detach, and what lies between

    def attach(self, module: nn.Module, loggers: Sequence[Any] = (), device: torch.device | None = None) -> None:
        """Follow a module that is on its device, sharded or not; several may train together.

        Args:
            module: Its parameters count, its layers are named. The same module a second time changes nothing.
            loggers: Lightning's; they get the figures, in place of those of an earlier call where any are given.
            device: Where it trains; by default where its parameters are.

        Raises:
            ValueError: It has no parameters, or they are on the meta device.

        """
        module = unwrapped(module)
        parameter = next(module.parameters(), None)
        if parameter is None or parameter.is_meta:
            raise ValueError(
                f"`MemoryMonitor` cannot follow `{type(module).__name__}`: its parameters are"
                f" {'on the meta device' if parameter is not None else 'none'}. Attach it to a model that is set up."
            )
        self._loggers = loggers or self._loggers
        if self._meter is None:
            self._meter = Meter(device or parameter.device, self._every_n_steps, self._on_step)
            self._meter.step = self._step
            if self._record_history:
                self._recording = _record_history(self._meter.device)
        # of a LightningModule nobody calls `forward`, but of what it holds
        self._meter.attach(module, [module, *module.children()])

    def detach(self) -> None:
        """Leave no hook behind. What has been gathered stays; figures that are still under way are dropped."""
        if self._meter is not None:
            self._meter.detach()
            self._step, self._meter = self._meter.step, None
        if self._recording:
            torch.cuda.memory._record_memory_history(enabled=None)
            self._recording = False
        self._loggers, self._trainer, self._coming = (), None, None

    @contextmanager
    def watch(self, module: nn.Module, loggers: Sequence[Any] = ()) -> Iterator[None]:
        """Follow a module in a loop of one's own, or after ``fabric.setup_module``, for the time of a block."""
        self.attach(module, loggers)
        try:
            yield
        except BaseException as error:
            self.on_exception(exception=error)
            raise
        self.on_train_end()

    def state_dict(self) -> dict[str, Any]:
        self._deliver()
        return {"step": self._step if self._meter is None else self._meter.step, "history": list(self._history)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._step, self._history = state_dict["step"], list(state_dict["history"])
        if self._meter is not None:
            self._meter.step = self._step

    @property
    def history(self) -> list[dict[str, float]]:
        """The figures that were logged, with the ``step`` of each; of a long run, every other, or fewer."""
        self._deliver()
        return self._history

    def _on_step(self, figures: dict[str, float] | None) -> None:
        self._deliver()
        if figures is not None and self._meter is not None:
            step = self._meter.step if self._trainer is None else _step_of_metrics(self._trainer)
            self._coming = step, OverRanks(list(figures.values()), self._meter.device)

    def _deliver(self) -> None:
        """Log the figures that have come from all ranks."""
        if self._coming is None or self._meter is None:
            return
        (step, coming), self._coming = self._coming, None
        by_rank, names = coming.wait(), self._meter.names
        self._rows_by_rank = [figures[names.index("expert_rows")] for figures in by_rank]
        summary = summarize(names, by_rank)
        for logger in self._loggers:
            separator = logger.group_separator
            metrics = {separator.join(("memory", *name.split("/"))): value for name, value in summary.items()}
            logger.log_metrics(metrics, step)
        self._history.append({"step": step, **summary})
        if len(self._history) > _MOST_ROWS:
            self._history = _halved(self._history, f"peak_{self._meter.gauge.name}")

    def _finish(self) -> None:
        try:
            if self._folder is not None and self._history and this_rank() == 0:
                save_timeline(self._history, self._folder / "timeline.png")
        except (ImportError, OSError) as error:  # not worth a training
            rank_zero_warn(
                f"`MemoryMonitor` draws no timeline: {error}. It takes matplotlib (`pip install matplotlib`) and a `folder`"
                " that can be written to."
            )
        finally:
            self.detach()

    def _explain(self, meter: Meter) -> str:
        reading = meter.gauge.read()
        situation = Situation(
            this_rank(),
            meter.step,
            meter.phase,
            meter.where,
            reading,
            meter.owners.held(reading.used),
            meter.loads.get(meter.where),
            self._rows_by_rank,
        )
        message = explain(situation)
        if self._folder is None or meter.device.type != "cuda":
            return message
        path = self._folder / f"out-of-memory-rank{this_rank()}-step{meter.step}.pickle"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]
        except (OSError, RuntimeError) as error:
            return f"{message}\n  no snapshot could be written to {path}: {error}"
        message = f"{message}\n  snapshot for https://pytorch.org/memory_viz: {path}"
        if torch._C._cuda_isHistoryEnabled():
            return message
        return f"{message} (`MemoryMonitor(record_history=True)` shows in it who allocated what)"

    # --- the Trainer; `fabric.call` gives no trainer

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.attach(pl_module, trainer.loggers, trainer.strategy.root_device)
        assert self._meter is not None
        self._trainer = trainer
        self._meter.step = _step_of_metrics(trainer)
        for optimizer in trainer.optimizers:
            self._meter.add_optimizer(
                getattr(optimizer, "optimizer", optimizer)
            )  # DeepSpeed's wraps the one that steps

    @override
    def on_train_batch_start(self, trainer: Any = None, pl_module: Any = None, *_: Any) -> None:
        self._enter("forward")

    @override
    def on_before_zero_grad(self, trainer: Any = None, pl_module: Any = None, optimizer: Any = None) -> None:
        # the Trainer drops the gradients of the step before between forward and backward: forward had them at its peak
        if self._meter is not None:
            self._meter.look()

    @override
    def on_before_backward(self, trainer: Any = None, pl_module: Any = None, loss: Any = None) -> None:
        self._enter("backward")

    @override
    def on_before_optimizer_step(self, trainer: Any = None, pl_module: Any = None, optimizer: Any = None) -> None:
        self._enter("optimizer")

    @override
    def on_train_batch_end(self, trainer: Any = None, pl_module: Any = None, *_: Any) -> None:
        self._enter(None)

    @override
    def on_train_end(self, trainer: Any = None, pl_module: Any = None) -> None:
        self._deliver()
        self._finish()

    @override
    def on_exception(self, trainer: Any = None, pl_module: Any = None, exception: BaseException | None = None) -> None:
        with suppress(RuntimeError):  # a device that is in trouble must not hide the reason
            if self._coming is not None and self._coming[1].have_come:  # a rank that failed may never send its own
                self._deliver()
            if self._meter is not None and exception is not None and is_out_of_memory(exception):
                exception.add_note(self._explain(self._meter))
        self._finish()

    @override
    def teardown(self, trainer: Any = None, pl_module: Any = None, stage: str = "") -> None:
        self.detach()

    def _enter(self, phase: str | None) -> None:
        if self._meter is not None:
            self._meter.enter(phase)

    # --- Fabric

    def on_after_setup(self, fabric: Any, module: nn.Module) -> None:
        """Fabric calls it from ``fabric.setup``, for losses without parameters too."""
        if next(module.parameters(), None) is not None:
            self.attach(module, fabric.loggers, fabric.device)


def _step_of_metrics(trainer: Trainer) -> int:
    """Where Lightning logs its own metrics: the batches before this one that ended in a step."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def _halved(rows: Sequence[dict[str, float]], peak: str) -> list[dict[str, float]]:
    """Of each two rows in turn the one with the higher peak. Rows of another device, before a run went on here, have none."""
    return [max(rows[i : i + 2], key=lambda row: row.get(peak, 0.0)) for i in range(0, len(rows), 2)]


def _record_history(device: torch.device) -> bool:
    """Have a snapshot show what happened before it. Whoever records already is left alone."""
    if device.type != "cuda" or torch._C._cuda_isHistoryEnabled():
        return False
    torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=_MOST_EVENTS)
    return True
