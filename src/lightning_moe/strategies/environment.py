"""What slows a run down or lets it fail later is said at start, with the mend. Nothing here is an error."""

from __future__ import annotations

import importlib.metadata
import os
import warnings
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from packaging.requirements import Requirement

from lightning_moe.checkpoint.ranks import gather
from lightning_moe.dispatch.select import locate, reads_peers
from lightning_moe.strategies.agreement import list_ranks

_DEEP_EP = "deep_ep<2"  # not on PyPI, so that no extra of this package can ask for a version
_EXTRAS = ("", "hf", "te")  # whose packages are imported in training
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the second is the older name


def warn_about_environment(group: dist.ProcessGroup, device: torch.device) -> None:
    """Have rank 0 warn of what any rank found; collective over all ranks.

    Args:
        group: The expert-parallel group.
        device: This rank's device.

    """
    found = [*check_versions(), *check_placement(locate(group, device), device)]
    if device.type == "cuda":
        found += check_variables(os.environ)
    by_rank = gather(found)
    if dist.get_rank() == 0:
        for problem in dict.fromkeys(problem for problems in by_rank for problem in problems):
            ranks = [rank for rank, problems in enumerate(by_rank) if problem in problems]
            where = "" if len(ranks) == len(by_rank) else f" (on {list_ranks(ranks)})"
            warnings.warn(problem + where, stacklevel=2)


def check_variables(environ: Mapping[str, str]) -> Iterable[str]:
    """What is wrong with environment variables, where there are GPUs."""
    if environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        yield (
            "`CUDA_DEVICE_MAX_CONNECTIONS=1` puts the work of all streams into one queue, so that dispatch and combine do not"
            " overlap with the experts' compute. Unset it."
        )
    if not any("expandable_segments:true" in environ.get(name, "").lower() for name in _ALLOCATOR):
        yield (
            "The allocator's segments cannot grow: routing changes the sizes that are asked for in every step, and reserved"
            " memory rises with them (17.8 instead of 14.0 GiB in a test). Set"
            " `PYTORCH_ALLOC_CONF=expandable_segments:True` before the start."
        )


def check_placement(places: list[tuple[str, int]], device: torch.device) -> Iterable[str]:
    """What is wrong with where the ranks of an expert-parallel group are; ``places`` from :func:`locate`."""
    hosts = sorted({host for host, _ in places})
    if len(hosts) > 1:
        yield (
            f"An expert-parallel group of {len(places)} ranks spans the hosts {', '.join(hosts)}: each layer's tokens cross the"
            " network. `expert_parallel_size='auto'` keeps groups on one host."
        )
    elif device.type == "cuda" and not reads_peers(places, device):
        yield (
            "GPUs of an expert-parallel group cannot read each other's memory, so tokens travel through the host's. See"
            " `nvidia-smi topo -p2p r`: it may be turned off in the BIOS (IOMMU, ACS) or by the container."
        )


def check_versions(requirements: Iterable[str] | None = None) -> Iterable[str]:
    """What is installed in versions that this package does not go with; ``requirements`` are those of its metadata."""
    if requirements is None:
        requirements = (*_own_requirements(), _DEEP_EP)
    for requirement in map(Requirement, requirements):
        if requirement.marker and not any(requirement.marker.evaluate({"extra": extra}) for extra in _EXTRAS):
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            yield (
                f"{requirement.name} {version} is installed, and lightning_moe is made for"
                f" {requirement.name} {requirement.specifier}. Install such a version: what is private to it may have moved."
            )


def _own_requirements() -> list[str]:
    try:
        return importlib.metadata.requires("lightning_moe") or []
    except importlib.metadata.PackageNotFoundError:  # run from its sources
        return []
