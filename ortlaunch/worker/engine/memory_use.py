"""What this rank's memory really holds: exact bytes of the live tensors by kind, and the peak of the process.

The plan (`ortlaunch/planning/memory.py`) says beforehand; this looks. The only place that names DeepSpeed's buffers.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch._subclasses import FakeTensor

from ortlaunch.plan import Plan
from ortlaunch.run_folder.records import MeasuredMemory, MemoryReport, PlannedMemory
from ortlaunch.units import human
from ortlaunch.worker.engine.memory_limits import status
from ortlaunch.worker.engine.stepping import Stepper
from ortlaunch.worker.process_group.distributed import DistributedContext

_LOOKS = 4  # before and after the first two steps: gradients live before a step, optimizer state after the first
_CLEAR = Path("/proc/self/clear_refs")
# Where DeepSpeed 0.19 keeps tensors beside those of the parameters and the optimizer inside it.
_MASTERS = ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat", "fp32_groups_flat_partition",
            "fp32_groups_flat", "fp32_groups")  # fmt: skip
_GRADIENTS = ("averaged_gradients", "all_grad_tensors", "grads_in_partition", "grad_partitions_flat_buffer",
              "fp32_groups_gradients_flat")  # fmt: skip
_WEIGHTS = ("bit16_groups_flat", "fp16_groups_flat", "bf16_groups_flat", "fp16_partitioned_groups_flat",
            "lp_param_buffer")  # fmt: skip


class Footprint(NamedTuple):
    """Bytes of the tensors of one rank, each storage once; `buckets` are communication's, `other` all the rest."""

    weights: int
    gradients: int
    optimizer: int
    buckets: int
    other: int

    @property
    def model(self) -> int:
        """What the plan calls exact: weights, gradients and optimizer state."""
        return self.weights + self.gradients + self.optimizer


class MemoryUse:
    """Looks at one rank from when its model was built; Python and the libraries that were resident do not count."""

    def __init__(self, device: torch.device, model: torch.nn.Module) -> None:
        self.device = device
        self.looks = 0
        self.largest = Footprint(0, 0, 0, 0, 0)
        self.resets = _reset_peak(device)
        self.baseline = (
            status("VmRSS") - _count(model.parameters(), {}) if device.type == "cpu" else 0
        )

    def look(self, stepper: Stepper) -> None:
        """Count the live tensors, before and after each of the first two steps; later calls cost nothing."""
        if self.looks == 0:
            self._look_before_reducing(stepper)
        if self.looks < _LOOKS:
            self.looks += 1
            self._count(stepper)
        if self.looks == _LOOKS and "allreduce_gradients" in vars(getattr(stepper, "engine", self)):
            del stepper.engine.allreduce_gradients  # type: ignore[attr-defined]

    def _look_before_reducing(self, stepper: Stepper) -> None:
        """ZeRO 1 and 2 let go of gradients at the end of the backward pass: look also just before, from step 2 on."""
        engine = getattr(stepper, "engine", None)
        if engine is None or engine.zero_optimization_stage() not in (1, 2):
            return
        reduce = engine.allreduce_gradients

        def look_and_reduce(*args: object, **kwargs: object) -> object:
            self._count(stepper)
            return reduce(*args, **kwargs)

        engine.allreduce_gradients = look_and_reduce

    def _count(self, stepper: Stepper) -> None:
        self.largest = Footprint(*map(max, zip(self.largest, live_bytes(stepper))))

    def peak(self) -> int:
        """Most bytes at once since this object was made."""
        if self.device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self.device))
        return max(0, status("VmHWM") - self.baseline)

    def record(self, plan: Plan, group: DistributedContext) -> MemoryReport:
        """Planned and measured side by side, for the rank that has most (collective)."""
        mine = {**self.largest._asdict(), "model": self.largest.model, "peak": self.peak()}
        ranks = [json.loads(text) for text in group.gather(json.dumps(mine))]
        worst = {name: max(rank[name] for rank in ranks) for name in mine}
        bytes_ = dict(plan.memory.by_stage)[plan.memory.chosen] if plan.memory else None
        beside = (
            bytes_.overhead if bytes_ and self.device.type == "cuda" else 0
        )  # what torch's allocator does not see
        return MemoryReport(
            planned=bytes_
            and PlannedMemory(**bytes_._asdict(), model=bytes_.model, peak=bytes_.total - beside),
            measured=MeasuredMemory(**worst),
            peak_is=_PEAK_IS[self.device.type]
            + ("" if self.resets else "; the kernel let no one reset the peak"),
            baseline=self.baseline,
            peak_by_rank=[rank["peak"] for rank in ranks],
        )


_PEAK_IS = {
    "cpu": "most resident bytes of the process, less what was resident, without the weights, when the model was built",
    "cuda": "torch.cuda.max_memory_allocated",
}


def memory_line(record: MemoryReport) -> str:
    """The record in one line for a person."""
    planned = record.planned
    measured = record.measured
    peak = f"memory a rank: {human(measured.peak)} at peak"
    model = f"  weights, gradients and optimizer: {human(measured.model)}"
    if planned is None:
        return f"{peak}, not planned\n{model}"
    return f"{peak}, planned {human(planned.peak)}\n{model}, planned {human(planned.model)}"


def live_bytes(stepper: Stepper) -> Footprint:
    """Bytes of every tensor that lives now, each storage in the first kind that holds it."""
    seen: dict[int, int] = {}
    sharder = getattr(stepper, "engine", None) and stepper.engine.optimizer  # type: ignore[attr-defined]
    parameters = list(stepper.module.parameters())
    optimizer: Any = (
        getattr(sharder, "optimizer", None) or getattr(stepper, "optimizer", None) or sharder
    )
    masters = [p for group in optimizer.param_groups for p in group["params"]] + list(
        _held(sharder, _MASTERS)
    )
    weights = _count([*_weights(parameters), *_held(sharder, _WEIGHTS)], seen)
    buckets = _count(_buckets(sharder), seen)  # before gradients, which lie in them for a while
    gradients = _count([*_gradients([*parameters, *masters]), *_held(sharder, _GRADIENTS)], seen)
    state = _count([*masters, *_tensors(list(optimizer.state.values()))], seen)
    return Footprint(weights, gradients, state, buckets, other=_count(_all_tensors(), seen))


def _weights(parameters: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    for parameter in parameters:
        yield parameter
        shard = getattr(parameter, "ds_tensor", None)  # ZeRO 3
        if shard is not None:
            yield shard


def _gradients(owners: list[Any]) -> Iterator[torch.Tensor]:
    for owner in owners:
        for gradient in (owner.grad, getattr(owner, "grad_accum", None)):
            if gradient is not None:
                yield gradient


def _held(owner: object, names: tuple[str, ...]) -> Iterator[torch.Tensor]:
    for name in names:
        yield from _tensors(getattr(owner, name, None))


def _buckets(sharder: object) -> Iterator[torch.Tensor]:
    for bucket in getattr(sharder, "ipg_buckets", {}).values():
        yield from _tensors(list(vars(bucket).values()))


def _tensors(value: object) -> Iterator[torch.Tensor]:
    """Tensors in lists and mappings, however deep."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple, set)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)


def _all_tensors() -> list[torch.Tensor]:
    # By type, not by isinstance: asking an object of a lazy module for its class would import that.
    return [found for found in gc.get_objects() if issubclass(type(found), torch.Tensor)]


def _count(tensors: Iterable[torch.Tensor], seen: dict[int, int]) -> int:
    """Bytes of the storages among `tensors` that are not in `seen` yet."""
    total = 0
    for tensor in tensors:
        try:
            if (
                isinstance(tensor, FakeTensor)
                or tensor.layout is not torch.strided
                or tensor.device.type == "meta"
            ):
                continue
            storage = tensor.untyped_storage()
            address = storage.data_ptr()
        except RuntimeError:  # other stand-ins have no device or no address
            continue
        if storage.nbytes() and address not in seen:
            seen[address] = storage.nbytes()
            total += storage.nbytes()
    return total


def _reset_peak(device: torch.device) -> bool:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    try:
        _CLEAR.write_text("5")
    except OSError:
        return False
    return True
