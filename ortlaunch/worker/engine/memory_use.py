"""The measured memory of this rank: exact bytes of the live tensors by type, and the peak.

`ortlaunch/planning/memory.py` estimates the same before the run. Only this module names the buffers
of DeepSpeed.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch._subclasses import FakeTensor

from ortlaunch.base.units import human_bytes
from ortlaunch.launch_plan import Plan, ProcessMemory
from ortlaunch.run_folder.records import MeasuredMemory, MemoryReport, PlannedMemory
from ortlaunch.worker.engine.memory_limits import process_status_bytes
from ortlaunch.worker.engine.stepping import Stepper
from ortlaunch.worker.model.fsdp import part_of_this_rank
from ortlaunch.worker.model.quantized_weights import quantized_layers, scale_tensors
from ortlaunch.worker.process_group.distributed import DistributedContext

# Before and after each of the first two steps: gradients exist before a step, and optimizer state
# exists only after the first step.
_RECORDS = 4
# Writing 5 into this file resets VmHWM, the peak of resident memory.
_CLEAR = Path("/proc/self/clear_refs")
# Attributes of DeepSpeed 0.19 with tensors that are neither parameters nor in its inner optimizer.
_MASTERS = ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat", "fp32_groups_flat_partition",
            "fp32_groups_flat", "fp32_groups")  # fmt: skip
_GRADIENTS = ("averaged_gradients", "all_grad_tensors", "grads_in_partition", "grad_partitions_flat_buffer",
              "fp32_groups_gradients_flat")  # fmt: skip
_WEIGHTS = ("bit16_groups_flat", "fp16_groups_flat", "bf16_groups_flat", "fp16_partitioned_groups_flat",
            "lp_param_buffer")  # fmt: skip


class TensorBytes(NamedTuple):
    """Bytes of the tensors of one rank; each storage counts once."""

    weights: int
    gradients: int
    optimizer: int
    buckets: int
    """Buffers of communication."""
    other: int
    """All other tensors."""

    @property
    def model(self) -> int:
        """Bytes of weights, gradients and optimizer state, which the plan computes exactly."""
        return self.weights + self.gradients + self.optimizer


class RankMemoryMeter:
    """The memory use of one rank since its model was built.

    Python and the libraries that were resident at that time do not count.
    """

    def __init__(self, device: torch.device, model: torch.nn.Module) -> None:
        self.device = device
        self.records = 0
        self.largest_footprint = TensorBytes(0, 0, 0, 0, 0)
        self.resets = _try_to_reset_peak_memory(device)
        # The weights are resident already, but count as the run's memory.
        weights = (
            _bytes_of_new_storages_and_add_them([*model.parameters(), *_scales(model)], {})
            if device.type == "cpu"
            else 0
        )
        self.process = _process_memory_besides_weights(weights)
        """The interpreter and the libraries, without a GPU."""
        self.baseline = self.process.total if device.type == "cpu" else 0

    def count_live_tensors_in_first_two_steps(self, stepper: Stepper) -> None:
        """Count the live tensors; to be called before and after each step.

        Only the first two steps are counted. Later calls cost nothing.
        """
        if self.records == 0:
            self._hook_count_before_zero_reduction(stepper)
        if self.records < _RECORDS:
            self.records += 1
            self._raise_largest_to_live_bytes(stepper)
        # Remove the hook of `_hook_count_before_zero_reduction`, so that later steps do not pay for it.
        if self.records == _RECORDS and "allreduce_gradients" in vars(
            getattr(stepper, "engine", self)
        ):
            del stepper.engine.allreduce_gradients  # type: ignore[attr-defined]

    def _hook_count_before_zero_reduction(self, stepper: Stepper) -> None:
        """Also count just before DeepSpeed reduces gradients, from step 2 on."""
        # ZeRO 1 and 2 free their gradients at the end of the backward pass, so that a count between
        # backward pass and step does not see them.
        engine = getattr(stepper, "engine", None)
        if engine is None or engine.zero_optimization_stage() not in (1, 2):
            return
        reduce = engine.allreduce_gradients

        def count_and_reduce(*args: object, **kwargs: object) -> object:
            self._raise_largest_to_live_bytes(stepper)
            return reduce(*args, **kwargs)

        engine.allreduce_gradients = count_and_reduce

    def _raise_largest_to_live_bytes(self, stepper: Stepper) -> None:
        self.largest_footprint = TensorBytes(
            *map(max, zip(self.largest_footprint, live_tensor_bytes_by_type(stepper)))
        )

    def peak_bytes(self) -> int:
        """Return the most bytes in use at once since this object was made."""
        if self.device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self.device))
        return max(0, process_status_bytes("VmHWM") - self.baseline)

    def gather_memory_report(self, plan: Plan, group: DistributedContext) -> MemoryReport:
        """Return planned and measured bytes; each measured figure is the largest of all ranks.

        This is a collective call.
        """
        bytes_of_rank = {
            **self.largest_footprint._asdict(),
            "model": self.largest_footprint.model,
            "peak": self.peak_bytes(),
        }
        bytes_by_rank = group.gather(bytes_of_rank)
        largest_bytes = {name: max(rank[name] for rank in bytes_by_rank) for name in bytes_of_rank}
        planned_bytes = dict(plan.memory.by_stage)[plan.memory.chosen] if plan.memory else None
        # On CUDA the measured peak is of torch's allocator, which does not see the overhead.
        overhead_bytes = (
            planned_bytes.overhead if planned_bytes and self.device.type == "cuda" else 0
        )
        return MemoryReport(
            planned=planned_bytes
            and PlannedMemory(
                **planned_bytes._asdict(),
                model=planned_bytes.model,
                peak=planned_bytes.total - overhead_bytes,
            ),
            measured=MeasuredMemory(**largest_bytes),
            peak_is=_PEAK_IS[self.device.type]
            + ("" if self.resets else "; the kernel did not allow a reset of the peak"),
            baseline=self.baseline,
            peak_by_rank=[rank["peak"] for rank in bytes_by_rank],
        )


_PEAK_IS = {
    "cpu": "peak resident bytes of the process, minus those resident when the model was built, "
    "without the weights",
    "cuda": "torch.cuda.max_memory_allocated",
}


def memory_summary_text(memory_report: MemoryReport) -> str:
    """Return the record as text for the terminal, in two lines."""
    planned = memory_report.planned
    measured = memory_report.measured
    peak_text = f"memory a rank: {human_bytes(measured.peak)} at peak"
    # A GPU's peak is that of torch's allocator, and no library is in it.
    process_text = (
        f", without Python and libraries; {human_bytes(memory_report.baseline + measured.peak)} resident with them"
        if memory_report.baseline
        else ""
    )
    model_text = f"  weights, gradients and optimizer: {human_bytes(measured.model)}"
    if planned is None:
        return f"{peak_text}, not planned{process_text}\n{model_text}"
    return (
        f"{peak_text}, planned {human_bytes(planned.peak)}{process_text}\n{model_text}, "
        f"planned {human_bytes(planned.model)}"
    )


def live_tensor_bytes_by_type(stepper: Stepper) -> TensorBytes:
    """Return the bytes of all live tensors; each storage counts in the first type that has it."""
    counted_storages: dict[int, int] = {}
    sharder = getattr(stepper, "engine", None) and stepper.engine.optimizer  # type: ignore[attr-defined]
    parameters = list(stepper.module.parameters())
    optimizer: Any = (
        getattr(sharder, "optimizer", None) or getattr(stepper, "optimizer", None) or sharder
    )
    masters = [p for group in optimizer.param_groups for p in group["params"]] + list(
        _tensors_of_attributes(sharder, _MASTERS)
    )
    weights = _bytes_of_new_storages_and_add_them(
        [
            *_parameters_and_zero_3_parts(parameters),
            *_scales(stepper.module),
            *_tensors_of_attributes(sharder, _WEIGHTS),
        ],
        counted_storages,
    )
    # Before gradients, because gradients may be views of the buckets.
    buckets = _bytes_of_new_storages_and_add_them(_bucket_tensors(sharder), counted_storages)
    gradients = _bytes_of_new_storages_and_add_them(
        [*_gradient_tensors([*parameters, *masters]), *_tensors_of_attributes(sharder, _GRADIENTS)],
        counted_storages,
    )
    state = _bytes_of_new_storages_and_add_them(
        [*masters, *_tensors_nested_in_containers(list(optimizer.state.values()))], counted_storages
    )
    return TensorBytes(
        weights,
        gradients,
        state,
        buckets,
        other=_bytes_of_new_storages_and_add_them(_all_live_tensors(), counted_storages),
    )


def _parameters_and_zero_3_parts(parameters: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    for parameter in parameters:
        yield parameter
        # ZeRO 3 keeps this rank's piece of a parameter here.
        shard = getattr(parameter, "ds_tensor", None)
        if shard is not None:
            yield shard


def _scales(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    for _, layer in quantized_layers(model):
        yield from scale_tensors(layer)


def _gradient_tensors(owners: list[Any]) -> Iterator[torch.Tensor]:
    for owner in owners:
        for gradient in (owner.grad, getattr(owner, "grad_accum", None)):
            if gradient is not None:
                yield gradient


def _tensors_of_attributes(
    owner: object, attribute_names: tuple[str, ...]
) -> Iterator[torch.Tensor]:
    for name in attribute_names:
        yield from _tensors_nested_in_containers(getattr(owner, name, None))


def _bucket_tensors(sharder: object) -> Iterator[torch.Tensor]:
    for bucket in getattr(sharder, "ipg_buckets", {}).values():
        yield from _tensors_nested_in_containers(list(vars(bucket).values()))


def _tensors_nested_in_containers(value: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested lists and mappings, of any depth."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple, set)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors_nested_in_containers(item)


def _all_live_tensors() -> list[torch.Tensor]:
    # By type, not by isinstance: to get `__class__` of a lazy module's object would import it.
    return [
        live_object
        for live_object in gc.get_objects()
        if issubclass(type(live_object), torch.Tensor)
    ]


def _bytes_of_new_storages_and_add_them(
    tensors: Iterable[torch.Tensor], counted_storages: dict[int, int]
) -> int:
    """Return the bytes of those storages of `tensors` that are not in `counted_storages`; add them to it."""
    total = 0
    for tensor in tensors:
        try:
            if (
                isinstance(tensor, FakeTensor)
                or tensor.layout is not torch.strided
                or tensor.device.type == "meta"
            ):
                continue
            storage = part_of_this_rank(tensor.detach()).untyped_storage()
            address = storage.data_ptr()
        # Other kinds of fake tensors have no device or no address.
        except RuntimeError:
            continue
        if storage.nbytes() and address not in counted_storages:
            counted_storages[address] = storage.nbytes()
            total += storage.nbytes()
    return total


def _process_memory_besides_weights(weight_bytes: int) -> ProcessMemory:
    resident = process_status_bytes("VmRSS") - weight_bytes
    try:
        private_bytes = process_status_bytes("RssAnon") - weight_bytes
    # Kernels that do not tell private bytes from those of files, such as gVisor's.
    except StopIteration:
        private_bytes = resident
    return ProcessMemory(private_bytes, resident - private_bytes, is_measured=True)


def _try_to_reset_peak_memory(device: torch.device) -> bool:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    try:
        _CLEAR.write_text("5")
    except OSError:
        return False
    return True
