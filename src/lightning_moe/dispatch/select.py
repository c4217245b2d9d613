"""Which dispatcher an expert-parallel group uses, and why."""

from __future__ import annotations

import importlib
import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from lightning_moe.dispatch.all_to_all import AllToAllDispatcher
from lightning_moe.dispatch.base import Dispatcher
from lightning_moe.dispatch.deep_ep import SIZES, DeepEPDispatcher
from lightning_moe.dispatch.local import LocalDispatcher
from lightning_moe.dispatch.transport import COMBINE, DISPATCH, CollectiveTransport, NVLinkTransport, Transport

DispatcherName = Literal["auto", "local", "nvlink", "deep_ep", "all_to_all"]
DISPATCHERS: tuple[str, ...] = get_args(DispatcherName)


@dataclass(frozen=True)
class Choice:
    """A dispatcher with the name it is reported under and the reasons for it."""

    dispatcher: Dispatcher
    name: str
    reasons: tuple[str, ...]


class Unfit(Exception):
    """Why a dispatcher cannot serve a group. Every rank of the group comes to the same verdict."""


def select_dispatcher(
    name: str,
    group: dist.ProcessGroup,
    device: torch.device,
    timeout: timedelta | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Choice:
    """Pick the dispatcher of an expert-parallel group; collective over it.

    Args:
        name: One of :data:`DISPATCHERS`. ``"auto"`` takes the first that fits of ``local`` (one rank holds all experts),
            ``nvlink`` (all ranks' GPUs can read each other's memory) and ``all_to_all`` (any group). ``deep_ep`` (2, 4 or 8
            ranks that can read each other's memory, with DeepEP installed) is taken when it is asked for.
        group: The expert-parallel group.
        device: This rank's device.
        timeout: How long a rank waits for its peers; that of ``torch.distributed`` where it is not given.
        dtype: Of the hidden states that will travel.

    Raises:
        ValueError: The name is unknown, or that dispatcher cannot serve this group.

    """
    check_dispatcher_name(name)
    passed_over = []
    for candidate in _AUTO if name == "auto" else (name,):
        try:
            dispatcher, title = _MAKERS[candidate](group, device, timeout or default_pg_timeout, dtype)
        except Unfit as reason:
            passed_over.append(f"not {candidate}, since {reason}")
        else:
            return Choice(
                dispatcher, title, ("the fastest that fits" if name == "auto" else "asked for by name", *passed_over)
            )
    raise ValueError(
        f"`dispatcher={name!r}` cannot serve this run: {passed_over[0]}. `dispatcher='auto'` finds one that can."
    )


def check_dispatcher_name(name: str) -> None:
    """Raise a ``ValueError`` unless ``name`` is one of :data:`DISPATCHERS`."""
    if name not in DISPATCHERS:
        names = ", ".join(map(repr, DISPATCHERS))
        raise ValueError(f"Expected argument `dispatcher` to be one of {names} but got {name!r}.")


def _local(
    group: dist.ProcessGroup, device: torch.device, timeout: timedelta, dtype: torch.dtype
) -> tuple[Dispatcher, str]:
    if group.size() > 1:
        raise Unfit(f"the experts live on {group.size()} ranks")
    return LocalDispatcher(), "local"


def _nvlink(
    group: dist.ProcessGroup, device: torch.device, timeout: timedelta, dtype: torch.dtype
) -> tuple[Dispatcher, str]:
    _check_gpus(group, device)
    _check_peer_access(group, device)
    try:
        transport = NVLinkTransport(group, device, timeout)
    except OSError as error:  # every rank raises it
        raise Unfit(str(error)) from error
    _check_works(
        lambda: _delivers(transport, group, device), (ImportError, RuntimeError), "symmetric memory", group, device
    )
    return AllToAllDispatcher(group, transport), f"all_to_all over {transport.name}"


def _deep_ep(
    group: dist.ProcessGroup, device: torch.device, timeout: timedelta, dtype: torch.dtype
) -> tuple[Dispatcher, str]:
    _check_gpus(group, device)
    if dtype != torch.bfloat16:
        raise Unfit(f"it sums rows of torch.bfloat16, and these are {dtype}")
    if group.size() not in SIZES:
        raise Unfit(f"it serves {', '.join(map(str, SIZES))} ranks, and there are {group.size()}")
    errors: list[str | None] = [None] * group.size()
    dist.all_gather_object(errors, _import_error("deep_ep"), group)
    without = {rank: error for rank, error in enumerate(errors) if error is not None}
    if without:
        raise Unfit(
            f"the package `deep_ep` cannot be imported on ranks {list(without)} ({next(iter(without.values()))}); it is built"
            " from https://github.com/deepseek-ai/DeepEP"
        )
    _check_peer_access(group, device)
    try:
        dispatcher = DeepEPDispatcher(group, device, timeout)
    except OSError as error:  # every rank raises it
        raise Unfit(str(error)) from error
    _check_works(
        lambda: _brings_back(dispatcher, group, device),
        (AssertionError, ImportError, RuntimeError),
        "DeepEP",
        group,
        device,
    )
    return dispatcher, "DeepEP"


def _all_to_all(
    group: dist.ProcessGroup, device: torch.device, timeout: timedelta, dtype: torch.dtype
) -> tuple[Dispatcher, str]:
    transport = CollectiveTransport(group)
    return AllToAllDispatcher(group, transport), f"all_to_all over {transport.name}"


_MAKERS: dict[str, Callable[[dist.ProcessGroup, torch.device, timedelta, torch.dtype], tuple[Dispatcher, str]]] = {
    "local": _local,
    "nvlink": _nvlink,
    "deep_ep": _deep_ep,
    "all_to_all": _all_to_all,
}

_AUTO = ("local", "nvlink", "all_to_all")
"""Fastest first. DeepEP takes multiprocessors from the experts: in one layer it was no faster than NCCL (see benchmarks)."""


def _check_gpus(group: dist.ProcessGroup, device: torch.device) -> None:
    if device.type != "cuda":
        raise Unfit("there is no GPU")
    if group.size() == 1:
        raise Unfit("there is no other rank")


def _check_peer_access(group: dist.ProcessGroup, device: torch.device) -> None:
    places = locate(group, device)
    if len({host for host, _ in places}) > 1:
        raise Unfit("the group spans several hosts")
    if not _all_agree(reads_peers(places, device), group, device):
        raise Unfit("the GPUs cannot read each other's memory")


def locate(group: dist.ProcessGroup, device: torch.device) -> list[tuple[str, int]]:
    """Host and index of each rank's device, by rank of the group; collective."""
    places: list[tuple[str, int]] = [("", 0)] * group.size()
    dist.all_gather_object(places, (socket.gethostname(), device.index or 0), group)
    return places


def reads_peers(places: list[tuple[str, int]], device: torch.device) -> bool:
    """Whether this rank's GPU can read the memory of all others at these places of its host."""
    peers = [index for _, index in places if index != device.index]
    return all(torch.cuda.can_device_access_peer(device, peer) for peer in peers)


def _check_works(
    self_check: Callable[[], bool],
    failures: tuple[type[Exception], ...],
    what: str,
    group: dist.ProcessGroup,
    device: torch.device,
) -> None:
    """Have every rank try, and all of them vote on what they found."""
    problem = "its self-check failed"
    try:
        works = self_check()
    except failures as error:  # it may be one rank's alone, and the others wait for its vote
        works, problem = False, f"{what} failed: {error}"
    if not _all_agree(works, group, device):
        raise Unfit(problem)


def _import_error(package: str) -> str | None:
    try:
        importlib.import_module(package)
    except ImportError as error:
        return str(error)
    return None


def _all_agree(verdict: bool, group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether every rank says yes."""
    votes = torch.tensor(int(verdict), device=device)
    dist.all_reduce(votes, dist.ReduceOp.MIN, group)
    return bool(votes)


def _delivers(transport: Transport, group: dist.ProcessGroup, device: torch.device) -> bool:
    """Send one row from each rank to each other and look at what arrives; twice each way, so that outboxes are used again."""
    size, rank = group.size(), group.rank()
    traffic = tuple(tuple(int(i != j) for j in range(size)) for i in range(size))
    sources = torch.tensor([peer for peer in range(size) if peer != rank], device=device)
    arrived = []
    for turn, way in enumerate((DISPATCH, COMBINE) * 2):
        inbox = torch.empty(size - 1, 16, dtype=torch.uint8, device=device)
        outbox = transport.outbox(way, traffic, inbox)
        outbox.fill_(4 * rank + turn)
        transport.exchange(way, traffic, outbox, inbox)
        arrived.append((inbox == (4 * sources + turn).unsqueeze(1)).all())
    return bool(torch.stack(arrived).all())


def _brings_back(dispatcher: Dispatcher, group: dist.ProcessGroup, device: torch.device) -> bool:
    """Send a token of each rank to every rank and the rows back as they are; twice, as the second finds what the first left."""
    size, rank = group.size(), group.rank()
    ids_TK = torch.arange(size, device=device).unsqueeze(0)
    (plan,) = dispatcher.plan(ids_TK, torch.ones_like(ids_TK, dtype=torch.float32), size, 1)
    sources = torch.tensor([*(peer for peer in range(size) if peer != rank), rank], device=device)
    right = []
    for turn in (1, 2):
        tokens_TH = torch.full((1, 256), turn + rank, dtype=torch.bfloat16, device=device)
        back_TH = torch.empty_like(tokens_TH)
        arriving = dispatcher.arriving(plan, [tokens_TH])
        dispatcher.dispatch(plan, [tokens_TH], arriving)
        (rows_NH,) = arriving.rows
        leaving = dispatcher.leaving(plan, [back_TH])
        for place in leaving.places:
            place.out[0].copy_(rows_NH[place.rows])
        dispatcher.combine(plan, leaving, [back_TH])
        right += [(rows_NH == (turn + sources).unsqueeze(1)).all(), (back_TH == size * tokens_TH).all()]
    return bool(torch.stack(right).all())
