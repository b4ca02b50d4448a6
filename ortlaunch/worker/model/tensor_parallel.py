"""Tensor parallelism: ranks compute each layer together, each with a slice of its weights.

transformers slices them, by a plan of layer names and styles: `colwise` divides the outputs of a
linear layer, `rowwise` its inputs, whose partial results are then summed over the ranks.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from torch import nn

from ortlaunch.base.errors import InputError
from ortlaunch.worker.model.named_state import Runs, autotp_slices_or_none

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

# The part of an adapter that has the divided side of its layer.
_ADAPTER_BY_STYLE = {"colwise": "lora_B", "rowwise": "lora_A"}
_HEAD_COUNTS = ("num_attention_heads", "num_key_value_heads")


def slice_layers_in_place(
    model: nn.Module, recipe_plan: Mapping[str, str], tensor_mesh: DeviceMesh
) -> None:
    """Leave this rank's slice of each layer of a plan, and make the ranks exchange activations.

    Args:
        model: the model that returns its loss, the same on all ranks.
        recipe_plan: styles by patterns of layer names, beside the model's own plan of transformers,
            and before it.
        tensor_mesh: the ranks that compute each layer together.

    Raises:
        InputError: no plan, one that does not fit the model, or heads that do not divide.
    """
    try:
        from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES
        from transformers.distributed.tensor_parallel import apply_tensor_parallelism
    except ImportError as error:
        raise InputError(
            f"parallel.tensor needs transformers 5.23 or newer, which slices the layers: {error}"
        ) from None
    planned_model, styles = planned_model_and_style_by_name(
        model, recipe_plan, tensor_mesh.size(), [*ALL_PARALLEL_STYLES]
    )
    # Gathering a parameter for an export takes two gathers: of the rows, and of the slices.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    try:
        apply_tensor_parallelism(planned_model, tensor_mesh, styles)
    except ValueError as error:
        raise InputError(f"parallel.tensor_plan: {error}") from error
    # Tied weights are one again.
    if hasattr(planned_model, "tie_weights"):
        planned_model.tie_weights()


def planned_model_and_style_by_name(
    model: nn.Module,
    recipe_plan: Mapping[str, str],
    rank_count: int,
    known_styles: Sequence[str],
) -> tuple[Any, dict[str, str]]:
    """Return the model that a plan names, and the style of each of its layers and parameters.

    Args:
        model: the model that returns its loss.
        recipe_plan: styles by patterns of layer names, which add to or change those of transformers.
        rank_count: ranks that compute each layer together.
        known_styles: the styles that a recipe may name.

    Raises:
        InputError: no plan, one that does not fit the model, or heads that do not divide.
    """
    planned_model: Any = model.model
    # Names are those of the model without adapters.
    if hasattr(planned_model, "get_base_model"):
        planned_model = planned_model.get_base_model()
    plan = {**(getattr(planned_model, "_tp_plan", None) or {}), **recipe_plan}
    if not plan:
        raise InputError(
            f"parallel.tensor: transformers has no plan for {type(planned_model).__name__}; give "
            "parallel.tensor_plan, as {layers.*.up: colwise, layers.*.down: rowwise}, or use "
            "parallel.shard alone"
        )
    # transformers plans each form of a layer, and a model may have no layer of some form.
    _require_fitting_plan(planned_model, recipe_plan, known_styles)
    # A plan of a recipe may leave out the attention.
    if any("att" in pattern for pattern in plan):
        _require_heads_divisible_by_rank_count(planned_model, rank_count)
    return planned_model, _style_by_name(planned_model, plan)


def _require_fitting_plan(
    model: nn.Module, plan: Mapping[str, str], known_styles: Sequence[str]
) -> None:
    names = [name for name, _ in itertools.chain(model.named_modules(), model.named_parameters())]
    patterns = {*names, *map(_pattern_of_name, names)}
    for pattern, style in plan.items():
        if style not in known_styles:
            raise InputError(
                f"parallel.tensor_plan: got {style} for {pattern}; a style is one of "
                f"{', '.join(known_styles)}"
            )
        if pattern not in patterns:
            linear_patterns = {
                _pattern_of_name(name)
                for name, layer in model.named_modules()
                if isinstance(layer, nn.Linear)
            }
            raise InputError(
                f"parallel.tensor_plan: no layer of the model is named {pattern}; its linear layers "
                f"are {', '.join(sorted(linear_patterns))}"
            )


def _require_heads_divisible_by_rank_count(model: nn.Module, rank_count: int) -> None:
    config: Any = getattr(model, "config", None)
    config = getattr(config, "get_text_config", lambda: config)()
    for field_name in _HEAD_COUNTS:
        head_count = getattr(config, field_name, None)
        if isinstance(head_count, int) and head_count % rank_count:
            raise InputError(
                f"parallel.tensor is {rank_count}, and the model has {field_name} {head_count}, "
                f"which it must divide; give {math.gcd(head_count, rank_count)}"
            )


def _pattern_of_name(name: str) -> str:
    """Return a name with `*` for numbers, and without the part that peft adds for an adapter."""
    return ".".join(
        "*" if part.isdigit() else part for part in name.split(".") if part != "base_layer"
    )


def _style_by_name(model: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """Return the style of each parameter and layer, parameters before their layer.

    Raises:
        InputError: an adapter that needs whole weights.
    """
    # Without the second names of tied weights, such as `lm_head.weight`.
    parameter_names = [name for name, _ in model.named_parameters()]
    styles = {
        name: style
        for name in parameter_names
        if (style := plan.get(name) or plan.get(_pattern_of_name(name)))
    }
    for name, layer in model.named_modules():
        style = plan.get(name) or plan.get(_pattern_of_name(name))
        if style is None:
            continue
        # Its base layer follows, under the same pattern.
        if hasattr(layer, "base_layer"):
            _require_adapter_of_linear_layer(name, layer)
            adapter_name = _ADAPTER_BY_STYLE.get(style)
            children = getattr(layer, adapter_name) if adapter_name else {}
            named_layers = {f"{name}.{adapter_name}.{key}": children[key] for key in children}
        elif hasattr(layer, "modules_to_save"):
            copies = cast(nn.ModuleDict, layer.modules_to_save)
            named_layers = {f"{name}.modules_to_save.{key}": copies[key] for key in copies}
        else:
            named_layers = {name: layer}
        for layer_name, styled_layer in named_layers.items():
            for parameter_name, _ in styled_layer.named_parameters(recurse=False):
                if (full_name := f"{layer_name}.{parameter_name}") in parameter_names:
                    styles.setdefault(full_name, style)
            styles[layer_name] = style
    return styles


def _require_adapter_of_linear_layer(name: str, adapted_layer: Any) -> None:
    has_weight_norms = any(getattr(adapted_layer, "use_dora", {}).values())
    if has_weight_norms or not isinstance(adapted_layer.base_layer, nn.Linear):
        raise InputError(
            f"parallel.tensor: the adapter of {name} needs whole weights; leave it out, or use "
            "parallel.shard alone"
        )


def dimension_by_parameter_pattern(model: nn.Module) -> dict[str, int | None]:
    """Return the dimension along which ranks slice each parameter; None: each has it whole."""
    named_parameters = cast("Iterable[tuple[str, DTensor]]", model.named_parameters())
    return {
        _pattern_of_name(name.removeprefix("model.")): sliced_dimension_or_none(parameter)
        for name, parameter in named_parameters
    }


def sliced_dimension_or_none(tensor: DTensor) -> int | None:
    """Return the dimension along which tensor parallelism has sliced a divided tensor, or None."""
    if not hasattr(tensor, "device_mesh"):
        slices = autotp_slices_or_none(tensor)
        return slices and slices.dimension
    names = tensor.device_mesh.mesh_dim_names or ()
    placement: Any = tensor.placements[-1] if "tensor" in names else None
    return placement.dim % tensor.dim() if hasattr(placement, "dim") else None


class TensorSlice(NamedTuple):
    """One rank's slice of a parameter."""

    shape: Sequence[int]
    first: int = 0
    """Its first element in the flattened parameter, if it is one range of it."""
    runs: Runs | None = None
    """Its runs in the flattened parameter, if it has several."""


def slice_of_tensor_rank(parameter: DTensor, tensor_index: int, tensor_count: int) -> TensorSlice:
    """Return one rank's slice of a parameter that `tensor_count` ranks share.

    Raises:
        InputError: fused weights that do not divide.
    """
    dimension = sliced_dimension_or_none(parameter)
    if dimension is None:
        return TensorSlice(parameter.shape)
    size = parameter.shape[dimension]
    # Fused layers, such as gate and up, are sliced one by one.
    fused_count = getattr(parameter.placements[-1], "split_factor", 1)
    if fused_count > 1 and size % (fused_count * tensor_count):
        raise InputError(
            f"parallel.tensor is {tensor_count}, and {size} rows of {fused_count} fused layers do not divide by it"
        )
    layer_size = size // fused_count
    slice_size = -(-layer_size // tensor_count)
    first_index = min(tensor_index * slice_size, layer_size)
    slice_size = min(slice_size, layer_size - first_index)
    return slice_of_fused_layers(parameter.shape, dimension, first_index, slice_size, fused_count)


def slice_of_fused_layers(
    whole_shape: Sequence[int],
    dimension: int,
    first_index: int,
    slice_size: int,
    fused_count: int = 1,
) -> TensorSlice:
    """Return a slice of each of the layers that are fused in a parameter.

    Args:
        whole_shape: the shape of the parameter.
        dimension: the dimension that is sliced, along which the layers follow each other.
        first_index: the index in each layer at which its slice begins.
        slice_size: the size of each layer's slice.
        fused_count: the number of layers.
    """
    elements_after = math.prod(whole_shape[dimension + 1 :])
    shape = [*whole_shape]
    shape[dimension] = slice_size * fused_count
    first, length = first_index * elements_after, slice_size * elements_after
    if math.prod(whole_shape[:dimension]) * fused_count == 1:
        return TensorSlice(shape, first)
    layer_size = whole_shape[dimension] // fused_count
    return TensorSlice(shape, 0, Runs(first, length, layer_size * elements_after))
