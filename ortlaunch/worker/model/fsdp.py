"""FSDP2: the model's weights, gradients and optimizer state divided by torch's `fully_shard`.

A parameter is divided along its first dimension: each rank that shares a copy of the model has its
rows, as a DTensor. A layer's weights are gathered before its passes, and freed after them; gradients
are averaged and divided in the backward pass.
"""

from __future__ import annotations

import inspect
import math
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import nn

from ortlaunch.base.errors import InputError
from ortlaunch.base.units import first_names_and_count_of_rest
from ortlaunch.recipe.fields.parallel import Parallel
from ortlaunch.worker.model.named_state import ParameterRange, Runs
from ortlaunch.worker.model.tensor_parallel import (
    slice_layers_in_place,
    slice_of_tensor_rank,
    sliced_dimension_or_none,
)
from ortlaunch.worker.process_group.distributed import (
    DistributedContext,
    build_device_mesh,
    overwrite_by_values_of_rank_0,
)
from ortlaunch.worker.weight_memory import WeightMemory

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def shard_model_in_place(
    model: nn.Module,
    settings: Parallel,
    group: DistributedContext,
    dtype: torch.dtype | None,
    compile_options: dict[str, Any] | None = None,
) -> int:
    """Divide the model over the ranks (collective); return the number of layers that are units.

    Args:
        model: the model that returns its loss, whole and on its device.
        settings: the recipe's `parallel`.
        group: all ranks, with their mesh.
        dtype: the type of gathered weights; None: their own. Gradients are averaged in float32.
        compile_options: torch.compile compiles each unit, with these options; None: nothing.

    Raises:
        InputError: the model has no such layers, or a parameter without a dimension cannot be left whole.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    scalar_by_name = parameters_without_dimension(model)
    if scalar_by_name and (reason := _reason_scalars_are_refused_or_empty(dtype)):
        raise InputError(
            f"parallel: FSDP2 cannot divide {next(iter(scalar_by_name))}, which has no dimension, and "
            f"{reason}; use zero: {{stage: 3}}, or give it the shape (1,) in a model of your own"
        )
    _require_same_parameters_on_all_ranks(model, group)
    values_by_name = {name: p.detach() for name, p in model.named_parameters()}
    device_mesh = build_device_mesh(group)
    if settings.tensor > 1:
        slice_layers_in_place(model, settings.tensor_plan, device_mesh["tensor"])
    options: dict[str, Any] = {
        "mesh": device_mesh["replicate", "shard"]
        if device_mesh["replicate"].size() > 1
        else device_mesh["shard"],
        # Autocast chooses the type of each operator, as without FSDP2.
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=dtype,
            reduce_dtype=None if dtype is None else torch.float32,
            cast_forward_inputs=False,
        ),
        **({"offload_policy": CPUOffloadPolicy()} if settings.offload else {}),
        # Each rank has them whole.
        **({"ignored_params": {*scalar_by_name.values()}} if scalar_by_name else {}),
    }
    units = [*_layers_gathered_as_units(model, settings.blocks)]
    # From the inside out: a unit has the parameters that no unit within it has.
    for layer in reversed(units):
        if compile_options is not None:
            layer.compile(dynamic=False, options=compile_options or None)
        fully_shard(layer, **options)
    fully_shard(model, **options)
    if any(value.is_meta for value in values_by_name.values()):
        values_by_buffer = {name: b.clone() for name, b in model.named_buffers() if not b.is_meta}
        model.to_empty(device=torch.device("cpu") if settings.offload else group.device)
        for name, buffer in model.named_buffers():
            buffer.data = values_by_buffer.get(name, buffer.data).to(group.device)
    for parameter in parameters_without_dimension(model).values():
        parameter.data = parameter.data.to(group.device)
    # The initial values may depend on the rank. DistributedDataParallel has those of rank 0, too.
    _fill_parts_with_values_of_rank_0(model, values_by_name, group)
    copy_values_from_rank_0(model.buffers(), group.device)
    return len(units)


def _reason_scalars_are_refused_or_empty(dtype: torch.dtype | None) -> str:
    """Return why no parameter can be left whole beside the divided ones; empty if one can."""
    from torch.distributed.fsdp import fully_shard

    if "ignored_params" not in inspect.signature(fully_shard).parameters:
        return "only torch 2.7 and newer can leave it whole on each rank"
    # torch's gradient scaler takes either divided gradients or whole ones.
    return "precision: fp16 needs all divided" if dtype == torch.float16 else ""


def _require_same_parameters_on_all_ranks(model: nn.Module, group: DistributedContext) -> None:
    """Check that ranks have parameters of the same names, shapes and types (collective).

    Raises:
        InputError: they have others, so that none could take its part from another's value.
    """
    own_texts = [f"{name} {tuple(p.shape)} {p.dtype}" for name, p in model.named_parameters()]
    checksums = group.gather(zlib.crc32("\n".join(own_texts).encode()))
    if len({*checksums}) > 1:
        texts_by_rank = group.gather(own_texts)
        rank = next(index for index, value in enumerate(checksums) if value != checksums[0])
        differing = {*texts_by_rank[0]} ^ {*texts_by_rank[rank]}
        raise InputError(
            f"parallel: rank {rank} and rank 0 have built other parameters: "
            f"{first_names_and_count_of_rest(sorted(differing), 4) or 'the same in another order'}"
        )


@torch.no_grad()
def _fill_parts_with_values_of_rank_0(
    model: nn.Module, values_by_name: dict[str, torch.Tensor], group: DistributedContext
) -> None:
    """Fill each rank's part of each parameter, one whole parameter after another (collective).

    Args:
        model: the divided model.
        values_by_name: the whole parameters; those of rank 0 count, or of its files.
        group: all ranks.
    """
    weight_files = getattr(model, "weight_files", None)
    for name, parameter in cast("Iterable[tuple[str, DTensor]]", model.named_parameters()):
        # Those of rank 0 are freed one by one.
        values = values_by_name.pop(name)
        if weight_files is not None and values.is_meta:
            file_values = weight_files.read_parameter(name.removeprefix("model."))
            values = file_values.to(values.dtype)
        flat = (
            values.to(group.device).reshape(-1)
            if group.rank == 0
            else torch.empty(values.numel(), dtype=values.dtype, device=group.device)
        )
        overwrite_by_values_of_rank_0(flat)
        part = part_of_this_rank(parameter)
        place = place_of_own_part(parameter, group)
        sliced = flat if place.runs is None else place.runs.view_of(flat).reshape(-1)
        part.view(-1).copy_(sliced[place.start :][: part.numel()])


@torch.no_grad()
def copy_values_from_rank_0(tensors: Iterable[torch.Tensor], device: torch.device) -> None:
    """Give every rank rank 0's values of these tensors, one after another (collective)."""
    for tensor in tensors:
        values = tensor.to(device).contiguous()
        overwrite_by_values_of_rank_0(values.view(-1))
        tensor.copy_(values)


def free_gathered_weights_if_sharded(model: nn.Module) -> None:
    """Leave only this rank's parts of the weights that no unit has.

    torch does so in the backward pass, which an evaluation does not have.
    """
    reshard: Any = getattr(model, "reshard", None)
    if reshard is not None:
        reshard()


def _layers_gathered_as_units(model: nn.Module, class_names: Sequence[str]) -> Iterator[Any]:
    """Yield the layers of these classes, else those that transformers names, else those of lists."""
    layers = [*model.modules()]
    names = set(class_names) or {
        name for layer in layers for name in getattr(layer, "_no_split_modules", None) or ()
    }
    units = [layer for layer in layers if type(layer).__name__ in names]
    if missing := set(class_names) - {type(layer).__name__ for layer in units}:
        repeated = Counter(type(layer).__name__ for layer in layers if [*layer.parameters()])
        raise InputError(
            f"parallel.blocks: the model has no layer of class {', '.join(sorted(missing))}; its "
            f"classes are {', '.join(sorted(repeated))}"
        )
    if not units:
        units = [
            layer
            for parent in layers
            if isinstance(parent, (nn.ModuleList, nn.Sequential)) and len(parent) > 1
            for layer in parent
        ]
    # A weight that is also used elsewhere, such as tied embeddings, is gathered with the rest.
    uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    for layer in dict.fromkeys(units):
        own = Counter(id(p) for _, p in layer.named_parameters(remove_duplicate=False))
        if own and all(uses[key] == count for key, count in own.items()):
            yield layer


def parameters_without_dimension(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that FSDP2 leaves whole on each rank, by name."""
    return {name: p for name, p in model.named_parameters() if not p.dim()}


def part_of_this_rank(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's rows of a divided tensor, and any other tensor as it is."""
    # DTensor is not imported: a model without FSDP2 does not need it, and it takes 0.1 s.
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def ranges_of_this_rank(
    model: nn.Module, optimizer: torch.optim.Optimizer, group: DistributedContext
) -> list[ParameterRange]:
    """Return this rank's rows of each trained parameter, or of its slice, as ranges."""
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    ranges = []
    named_parts = cast("Iterable[tuple[str, DTensor]]", model.named_parameters())
    for name, parameter in named_parts:
        # A rank has no rows of a small parameter.
        if not parameter.requires_grad or not (count := part_of_this_rank(parameter).numel()):
            continue
        place = place_of_own_part(parameter, group)
        ranges.append(
            ParameterRange(
                name,
                place.start,
                count,
                parameter,
                0,
                groups[id(parameter)],
                place.runs,
                is_saved=place.is_first_copy,
            )
        )
    return ranges


class PlaceOfPart(NamedTuple):
    """The place of a rank's part in a whole flattened parameter."""

    runs: Runs | None
    """The slice that has the part; None: the whole parameter."""
    start: int
    """The first element of the part in its slice."""
    is_first_copy: bool
    """Whether no rank before this one in its copy of the model has the part, too."""


def place_of_own_part(parameter: DTensor, group: DistributedContext) -> PlaceOfPart:
    """Return the place of this rank's part of a divided parameter."""
    assert group.mesh is not None
    mesh = group.mesh
    part_index, tensor_index = divmod(group.rank % mesh.ranks_of_copy, mesh.tensor)
    if not parameter.dim():
        return PlaceOfPart(None, 0, part_index == tensor_index == 0)
    tensor_slice = slice_of_tensor_rank(parameter, tensor_index, mesh.tensor)
    # FSDP2 divides the rows as torch.chunk does.
    row_count, *row_shape = tensor_slice.shape
    first_row = min(-(-row_count // mesh.shard) * part_index, row_count)
    return PlaceOfPart(
        tensor_slice.runs,
        tensor_slice.first + first_row * math.prod(row_shape),
        tensor_index == 0 or sliced_dimension_or_none(parameter) is not None,
    )


def replace_parts_by_whole_parameters(
    model: nn.Module, keeps_values: bool, weight_memory: WeightMemory
) -> None:
    """Replace each divided parameter by a whole one in host memory, one after another (collective).

    The model cannot be called afterwards.

    Args:
        keeps_values: whether this rank keeps the values; the others give theirs.
        weight_memory: where.
    """
    whole_by_part: dict[int, nn.Parameter] = {}
    for layer in model.modules():
        for name, parameter in [*layer._parameters.items()]:
            if parameter is None or not hasattr(parameter, "full_tensor"):
                continue
            if id(parameter) not in whole_by_part:
                whole = cast("DTensor", parameter.detach()).full_tensor()
                values = (
                    weight_memory.tensor_in_memory_or_file(whole.cpu())
                    if keeps_values
                    else whole.new_empty(0)
                )
                whole_by_part[id(parameter)] = nn.Parameter(values, parameter.requires_grad)
            # Tied parameters stay one.
            layer._parameters[name] = whole_by_part[id(parameter)]
