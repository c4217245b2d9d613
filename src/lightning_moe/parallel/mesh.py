"""The device mesh: world = expert-data-parallel x expert-parallel ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

EDP = "expert_data_parallel"
EP = "expert_parallel"
WORLD = "data_parallel"


@dataclass(frozen=True)
class MoEMesh:
    """The ranks of a run, seen three ways.

    Every rank has its own data, so dense parameters are sharded over the whole world. Ranks of one EP group hold
    different experts; ranks of one EDP group hold the same. EP ranks are neighbours: a group stays on one host where it fits.

    Args:
        mesh: The two-dimensional mesh, EDP x EP.
        world: The same ranks as one axis: what dense parameters are sharded over.

    """

    mesh: DeviceMesh
    world: DeviceMesh

    @staticmethod
    def build(device_type: str, world_size: int, expert_parallel_size: int) -> MoEMesh:
        """Create the process groups: a collective call, in the same order on every rank."""
        check_expert_parallel_size(expert_parallel_size, world_size)
        shape = (world_size // expert_parallel_size, expert_parallel_size)
        mesh = init_device_mesh(device_type, shape, mesh_dim_names=(EDP, EP))
        return MoEMesh(mesh, mesh._flatten(WORLD))

    @property
    def expert_parallel(self) -> DeviceMesh:
        """The ranks that share out the experts between them."""
        return self.mesh[EP]

    @property
    def expert_data_parallel(self) -> DeviceMesh:
        """The ranks that hold the same experts: where there are several, FSDP shards expert parameters over them."""
        return self.mesh[EDP]

    @property
    def expert_parallel_group(self) -> dist.ProcessGroup:
        return self.mesh.get_group(EP)

    def __str__(self) -> str:
        return f"{EDP} {self.mesh.size(0)} x {EP} {self.mesh.size(1)} (world {self.mesh.size()})"


def resolve_expert_parallel_size(
    size: int | Literal["auto"], world_size: int, ranks_per_host: int, expert_counts: list[int]
) -> int:
    """The size of the expert-parallel groups.

    Args:
        size: As the user gave it. ``"auto"`` is the largest size that divides the world and every layer's number of
            experts and stays on one host.
        world_size: Ranks of the run.
        ranks_per_host: Ranks on each host.
        expert_counts: E of every MoE layer of the model.

    Raises:
        ValueError: The size divides the world or the experts of a layer not.

    """
    if size == "auto":
        return math.gcd(world_size, ranks_per_host, *expert_counts)
    check_expert_parallel_size(size, world_size)
    for num_experts in expert_counts:
        if num_experts % size:
            fitting = [n for n in range(1, world_size + 1) if world_size % n == 0 and num_experts % n == 0]
            raise ValueError(
                f"`expert_parallel_size={size}` must divide the number of experts, but a layer has {num_experts}."
                f" Sizes that fit this model and {world_size} processes: {', '.join(map(str, fitting))};"
                " or use `expert_parallel_size='auto'`."
            )
    return size


def check_expert_parallel_size(size: int | Literal["auto"], world_size: int | None = None) -> None:
    """Raise a ``ValueError`` for a size that no model can be trained with."""
    if size != "auto" and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
        raise ValueError(
            f"Expected argument `expert_parallel_size` to be 'auto' or a positive integer but got {size!r}."
        )
    if world_size is not None and size != "auto" and world_size % size:
        fitting = [n for n in range(1, world_size + 1) if world_size % n == 0]
        raise ValueError(
            f"`expert_parallel_size={size}` must divide the number of processes, {world_size}"
            f" (devices x nodes). Sizes that fit: {', '.join(map(str, fitting))}; or use `expert_parallel_size='auto'`."
        )
