"""The process group of a run: its start (with join.py), the checks of the world, and its end.

Only this module starts and ends torch.distributed and writes rank variables into the environment.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import socket
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from ortlaunch.base import machine
from ortlaunch.base.errors import DeviceError, LaunchError, WorldError
from ortlaunch.base.units import count_with_noun
from ortlaunch.launch_plan import Mesh, Plan
from ortlaunch.rank import Rank, rank_and_launcher_name_or_none
from ortlaunch.run_folder.folder import RunDir
from ortlaunch.worker.process_group.flight_recorder import set_flight_recorder_variables_unless_set
from ortlaunch.worker.process_group.join import (
    JOIN_TIMEOUT,
    RANKS_MET,
    are_all_on_one_host,
    is_mpi_launcher,
    meet_ranks_and_init_process_group,
    replace_gloo_timeout_by_missing_connections_error,
)
from ortlaunch.worker.process_group.peer_users import refuse_foreign_users_in_new_groups
from ortlaunch.worker.supervision.gpus import (
    reason_torch_sees_no_gpu_and_remedy,
    set_cuda_kernel_cache_and_loading_unless_set,
    set_visible_gpus_and_return_own_index,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# Groups live as long as the process. A gloo group that is freed joins its threads while it holds
# the GIL, and one of them may wait for the GIL. This deadlock occurred at the end of a run, when
# DistributedDataParallel had the last reference.
_KEPT: list[object] = []
# Larger worlds connect on demand (see `_let_gloo_connect_on_demand`).
_MAX_MESH_RANKS = 64


class DistributedContext:
    """The process group of a run, seen from one rank."""

    def __init__(
        self,
        rank: Rank,
        device: torch.device,
        channel: Any = None,
        mesh: Mesh | None = None,
        has_fsdp2: bool = False,
    ) -> None:
        self.mesh = mesh
        """The axes of the ranks, if `parallel` divides the model over them."""
        self.has_fsdp2 = has_fsdp2
        """Whether FSDP2 divides the model over the mesh."""
        self.data_parallel = self
        """The ranks that read other samples than this one, and itself: all ranks, except those that
        compute the same layers."""
        self.rank = rank.rank
        self.size = rank.world_size
        self.local = rank
        self.device = device
        # torch's process group; None is the default group of all ranks.
        self._channel = channel

    def duplicate_on_new_cpu_group(self) -> DistributedContext:
        """Return a context of the same ranks on a new group, for another thread (collective)."""
        return DistributedContext(
            self.local,
            torch.device("cpu"),
            create_cpu_group_of_all_ranks() if self.size > 1 else None,
        )

    def barrier(self) -> None:
        """Wait for every rank."""
        if self.size > 1:
            dist.barrier(group=self._channel)

    def mean_over_ranks(self, value: float) -> float:
        """Return the mean over the ranks, in float64."""
        return self.sum_over_ranks(value) / self.size

    def sum_over_ranks(self, value: float) -> float:
        """Return the sum over the ranks, in float64."""
        if self.size == 1:
            return value
        tensor = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, group=self._channel)
        return float(tensor)

    def gather_numbers(self, rank_numbers: list[float]) -> list[list[float]]:
        """Return every rank's numbers in rank order, in float64; all ranks give equally many."""
        if self.size == 1:
            return [rank_numbers]
        rank_tensor = torch.tensor(rank_numbers, dtype=torch.float64, device=self.device)
        tensors = [torch.empty_like(rank_tensor) for _ in range(self.size)]
        dist.all_gather(tensors, rank_tensor, group=self._channel)
        return [tensor.tolist() for tensor in tensors]

    def gather(self, value: object) -> list[Any]:
        """Return every rank's value, in rank order, as JSON reads it: a tuple becomes a list."""
        return list(map(json.loads, self._gather_bytes(json.dumps(value).encode())))

    def gather_arrays_on_rank_0(
        self, arrays: Mapping[str, NDArray[Any]]
    ) -> list[dict[str, NDArray[Any]]]:
        """Return every rank's arrays by name, in rank order, on rank 0; return [] on the others."""
        if self.size == 1:
            return [dict(arrays)]
        form_by_name = {name: (array.dtype.str, array.shape) for name, array in arrays.items()}
        data = b"".join(array.tobytes() for array in arrays.values())
        parts = self._gather_bytes(data, goes_to_all_ranks=False)
        return [
            _arrays_by_name_from_bytes(*forms_and_bytes)
            for forms_and_bytes in zip(self.gather(form_by_name), map(bytearray, parts))
        ]

    def gather_rows_with_gradients(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows of all ranks in rank order; all ranks give equally many (collective).

        The backward pass sums the gradients of all ranks for each rank's rows, so it is collective.
        """
        if self.size == 1:
            return rows
        all_rows: torch.Tensor = _RowsOfAllRanks.apply(rows, self.size, self.rank, self._channel)
        return all_rows

    def _gather_bytes(self, rank_bytes: bytes, goes_to_all_ranks: bool = True) -> list[bytes]:
        """Return every rank's bytes in rank order, on all ranks or on rank 0 alone."""
        # torch's collectives of objects unpickle what comes, which runs the sender's code.
        if self.size == 1:
            return [rank_bytes]
        sizes = [int(size) for (size,) in self.gather_numbers([len(rank_bytes)])]
        padded = bytearray(rank_bytes.ljust(max(1, *sizes), b"\0"))
        rank_tensor = torch.frombuffer(padded, dtype=torch.uint8).to(self.device)
        tensors = [
            torch.empty_like(rank_tensor) for _ in sizes if goes_to_all_ranks or self.rank == 0
        ]
        if goes_to_all_ranks:
            dist.all_gather(tensors, rank_tensor, group=self._channel)
        else:
            dist.gather(rank_tensor, tensors or None, group=self._channel, group_dst=0)
        return [tensor.cpu().numpy().tobytes()[:size] for tensor, size in zip(tensors, sizes)]

    def print_lines_of_all_ranks(self, lines: list[str]) -> None:
        """Print the lines of all ranks on rank 0, each line once (collective)."""
        self.print_on_rank_0(
            *dict.fromkeys(line for rank_lines in self.gather(lines) for line in rank_lines)
        )

    def print_on_rank_0(self, *lines: str) -> None:
        """Print the lines on rank 0 alone."""
        if self.rank == 0 and lines:
            print(*lines, sep="\n", flush=True)


class _RowsOfAllRanks(torch.autograd.Function):
    """All-gather along the first dimension; torch's own with gradients is deprecated from 2.13 on."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, rank_count: int, own_rank: int, channel: Any
    ) -> torch.Tensor:
        ctx.channel, ctx.begin, ctx.count = channel, own_rank * len(rows), len(rows)
        parts = [torch.empty_like(rows) for _ in range(rank_count)]
        dist.all_gather(parts, rows.contiguous(), group=channel)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        # Each rank's loss uses the rows of all ranks.
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.channel)
        return gradient[ctx.begin : ctx.begin + ctx.count], None, None, None


def _arrays_by_name_from_bytes(
    form_by_name: Mapping[str, tuple[str, Sequence[int]]], joined_bytes: bytearray
) -> Any:
    """Return the arrays of these types and shapes that lie one after the other in the data."""
    arrays: dict[str, NDArray[Any]] = {}
    begin = 0
    for name, (dtype_text, shape) in form_by_name.items():
        arrays[name] = np.ndarray(shape, dtype_text, joined_bytes, begin)
        begin += arrays[name].nbytes
    return arrays


def create_cpu_group_of_all_ranks() -> dist.ProcessGroup:
    """Make another group of all ranks, on the CPU (collective).

    Its messages are independent of those of the first group.
    """
    new_group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=JOIN_TIMEOUT)
    _KEPT.append(new_group)
    return new_group


def overwrite_by_values_of_rank_0(flat_tensor: torch.Tensor) -> None:
    """Give every rank rank 0's values of a contiguous tensor of one dimension (collective)."""
    # As bytes: gloo does not have all types.
    dist.broadcast(flat_tensor.view(torch.uint8), src=0)


def build_device_mesh(group: DistributedContext) -> DeviceMesh:
    """Make the groups of ranks along the axes of the group's mesh (collective)."""
    from torch.distributed.device_mesh import init_device_mesh

    assert group.mesh is not None
    device_mesh = init_device_mesh(group.device.type, group.mesh, mesh_dim_names=group.mesh._fields)
    _KEPT.extend(device_mesh.get_all_groups())
    return device_mesh


def _make_data_parallel_group(group: DistributedContext) -> DistributedContext:
    """Return the ranks with this one's slice of each layer, as a group (collective)."""
    if group.mesh is None or group.mesh.tensor == 1:
        return group
    tensor = group.mesh.tensor
    channel, _ = dist.new_subgroups_by_enumeration(
        [[*range(first_rank, group.size, tensor)] for first_rank in range(tensor)]
    )
    _KEPT.append(channel)
    own_place = group.local._replace(rank=group.rank // tensor, world_size=group.size // tensor)
    return DistributedContext(own_place, group.device, channel)


@contextlib.contextmanager
def join_process_group_until_end(
    plan: Plan, rank: Rank, run: RunDir
) -> Iterator[DistributedContext]:
    """Join the planned world; leave it at the end of the context.

    Args:
        plan: the run's plan.
        rank: this rank, as the launcher made it.
        run: the run folder.

    Raises:
        LaunchError: the launcher's world is not the plan's, or the ranks cannot meet.
    """
    require_planned_rank(plan, rank)
    machine.raise_open_file_limit_to_hard_limit()
    # Ranks of one host connect at once: who has connected is checked when a group is made.
    if not are_all_on_one_host(rank):
        _let_gloo_connect_on_demand(rank.world_size, os.environ)
    _lower_torch_debug_level_for_ddp(plan, rank)
    device = _set_visible_gpus_and_return_device(plan, rank)
    detected_launcher = rank_and_launcher_name_or_none(os.environ)
    launcher = detected_launcher[1] if detected_launcher else ""
    if device.type == "cuda":
        set_flight_recorder_variables_unless_set(os.environ, run)
    with refuse_foreign_users_in_new_groups():
        meet_ranks_and_init_process_group(
            plan,
            rank,
            run,
            _init_process_group_arguments(plan.node_of(rank.rank).devices, rank, device),
        )
        _set_rank_environment_variables(rank, device)
        has_mesh = rank.world_size > 1
        group = DistributedContext(
            rank,
            device,
            mesh=plan.mesh if has_mesh else None,
            has_fsdp2=has_mesh and plan.has_fsdp2,
        )
        group.data_parallel = _make_data_parallel_group(group)
        yield group
    # Skipped after an error, when other ranks may wait in a collective.
    _KEPT.append(dist.group.WORLD)
    dist.destroy_process_group()
    if is_mpi_launcher(launcher) and not are_all_on_one_host(rank):
        from mpi4py import MPI

        MPI.Finalize()


def _let_gloo_connect_on_demand(rank_count: int, environ: MutableMapping[str, str]) -> None:
    """Make gloo connect two ranks at their first message, in large worlds.

    A value of the user is kept.
    """
    # By default each group connects every rank to all others. On demand, an all-reduce needs two
    # connections per rank for any number of ranks (`benchmarks/parts.py gloo_connections`). Small
    # runs keep the full mesh: there a closed port ends the start and not the first step.
    if rank_count > _MAX_MESH_RANKS:
        environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")


def _lower_torch_debug_level_for_ddp(plan: Plan, rank: Rank) -> None:
    """Replace a debug level of torch at which its DistributedDataParallel crashes."""
    # SIGSEGV in torch 2.13; DeepSpeed, which does not use it, trains.
    if plan.deepspeed is None and dist.get_debug_level() == dist.DebugLevel.DETAIL:
        dist.set_debug_level(dist.DebugLevel.INFO)
        if rank.rank == 0:
            print("TORCH_DISTRIBUTED_DEBUG: INFO, for DETAIL crashes DistributedDataParallel")


def require_planned_rank(plan: Plan, rank: Rank) -> None:
    """Check that the launcher's rank is the planned one.

    Raises:
        WorldError: it is not.
    """
    if rank.world_size != plan.world_size:
        raise WorldError(
            f"the plan has {count_with_noun(plan.world_size, 'rank')}, the launcher started "
            f"{rank.world_size}; nothing was trained, because a different world size is a "
            "different training"
        )
    planned = plan.ranks[rank.rank]
    if rank != planned:
        raise WorldError(f"rank {rank.rank} should be {planned}, the launcher made it {rank}")


def require_same_recipe_and_plan_and_mark_ranks_met(
    group: DistributedContext, run: RunDir, file_texts: list[str]
) -> None:
    """Check that all ranks have read the same recipe and plan (collective).

    Raises:
        LaunchError: this rank and another one have read different files.
    """
    # A rank that started early may have read the files of an older run.
    digest = hashlib.sha256("".join(file_texts).encode()).hexdigest()
    with replace_gloo_timeout_by_missing_connections_error():
        digests = group.gather(digest)
    RANKS_MET.set()
    other_rank = next(
        (rank for rank, rank_digest in enumerate(digests) if rank_digest != digest), None
    )
    if other_rank is not None:
        raise LaunchError(
            f"rank {group.rank} and rank {other_rank} have read different files in {run}; start again, "
            "in a folder that all hosts share"
        )


def _set_visible_gpus_and_return_device(plan: Plan, rank: Rank) -> torch.device:
    if plan.device == "cpu":
        return torch.device("cpu")
    devices = plan.node_of(rank.rank).devices
    index = set_visible_gpus_and_return_own_index(devices, rank, os.environ)
    set_cuda_kernel_cache_and_loading_unless_set(os.environ)
    host_name = socket.gethostname()
    if not torch.cuda.is_available():
        raise DeviceError(
            f"the plan trains on cuda, and no GPU is visible on {host_name}: {reason_torch_sees_no_gpu_and_remedy()}"
        )
    gpu_count = torch.cuda.device_count()
    if index >= gpu_count:
        raise DeviceError(
            f"rank {rank.rank} is planned on GPU {devices[rank.local_rank]} of {host_name}, and CUDA "
            f"shows {gpu_count} of its planned GPUs ({', '.join(map(str, devices))})"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _init_process_group_arguments(
    gpu_by_local_rank: Sequence[int], rank: Rank, device: torch.device
) -> dict[str, object]:
    """Return the arguments of init_process_group.

    They are NCCL with the rank's GPU, or gloo on CPUs and where ranks share a GPU.
    """
    # NCCL accepts only one rank per GPU.
    if device.type == "cpu" or len(set(gpu_by_local_rank)) < len(gpu_by_local_rank):
        return {"backend": "gloo"}
    release = tuple(map(int, re.findall(r"\d+", torch.__version__)[:3]))
    # With device_id NCCL connects at once, and a barrier does not have to guess the GPU. Releases
    # after 2.6.0 and before 2.7.1 then hang (pytorch issue 153960). A single rank has nothing to
    # connect.
    is_given = rank.world_size > 1 and not (2, 6, 0) < release < (2, 7, 1)
    return {"backend": "nccl", **({"device_id": device} if is_given else {})}


def _set_rank_environment_variables(rank: Rank, device: torch.device) -> None:
    """Write the rank's variables, which DeepSpeed and transformers read."""
    # Both use LOCAL_RANK as the index of the GPU: 0 if CUDA shows the process only one GPU.
    os.environ.update(
        RANK=str(rank.rank),
        WORLD_SIZE=str(rank.world_size),
        LOCAL_RANK=str(rank.local_rank if device.index is None else device.index),
        LOCAL_WORLD_SIZE=str(rank.local_world_size),
    )
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "0")
