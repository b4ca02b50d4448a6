"""Memory of a rank of `parallel`: its part of every parameter, and the weights that it gathers.

FSDP2 divides a parameter along its first dimension, into equal parts but for the last ones: a rank
holds as much as the first one, whose part is the largest. Tensor parallelism gives a rank a slice
of the attention heads, of the inner width, of embeddings and of the output layer. Tests compare the parts with
torch's `fully_shard` on 8 to 1,024 ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ortlaunch.launch_plan import Bytes
from ortlaunch.planning.model_sizes import ModelShape, build_model_shape
from ortlaunch.planning.startup import state_bytes_per_parameter
from ortlaunch.recipe import Recipe
from ortlaunch.tables.families import PlannedConfig

_FLOAT32_BYTES = 4


class _Parameter(NamedTuple):
    """A parameter: its first dimension, and the product of the others."""

    rows: int
    columns: int

    def elements_of_first_part(self, part_count: int) -> int:
        return -(-self.rows // part_count) * self.columns


def config_of_tensor_slice(config: PlannedConfig, tensor_count: int) -> PlannedConfig:
    """Return the config of a model that is as large as the slice of one of `tensor_count` ranks."""
    if tensor_count == 1:
        return config
    head_count = config["num_attention_heads"]
    sliced: PlannedConfig = {
        **config,
        "num_attention_heads": -(-head_count // tensor_count),
        "num_key_value_heads": -(
            -(config.get("num_key_value_heads") or head_count) // tensor_count
        ),
        "head_dim": config.get("head_dim") or config["hidden_size"] // head_count,
        "intermediate_size": -(-config["intermediate_size"] // tensor_count),
        "embedding_rows": -(-config["vocab_size"] // tensor_count),
    }
    return sliced


def bytes_of_fsdp2_rank(
    recipe: Recipe, slice_config: PlannedConfig, activation_bytes: int, part_count: int
) -> Bytes:
    """Return the bytes of a rank, which holds one of `part_count` parts of everything.

    Beside its parts it has gathered weights: of all that is in no layer, of the layer that it
    computes and of the next one; and as many gradients, which are not divided yet.

    Args:
        recipe: the recipe.
        slice_config: the model's config, of the rank's slice with tensor parallelism.
        activation_bytes: bytes of its activations.
        part_count: parts of a copy of the model (`parallel.shard`).
    """
    shape = build_model_shape(slice_config, recipe.model.task)
    adapters = _adapter_parameters(recipe, shape)
    if recipe.model.quantize:
        shape = shape.shape_without_block_layers()
    width = slice_config["hidden_size"]
    layers = [
        _parameters_of_layer(group.linear_layers, group.vector_sizes)
        for group in shape.layer_groups
    ]
    others = _parameters_outside_layers(shape.other_sizes, width)
    kept = [*others, *adapters]
    for group, parameters in zip(shape.layer_groups, layers):
        kept += parameters * group.layer_count
    held_elements = _elements_of_first_parts(kept, part_count)
    trained_elements = _elements_of_first_parts(adapters or kept, part_count)
    largest_layer = max((_elements_of_first_parts(layer, 1) for layer in layers), default=0)
    gathered_elements = 2 * (_elements_of_first_parts(others, 1) + 2 * largest_layer)
    return Bytes(
        weights=_FLOAT32_BYTES * held_elements,
        gradients=_FLOAT32_BYTES * trained_elements,
        optimizer=state_bytes_per_parameter(recipe) * trained_elements,
        activations=activation_bytes,
        buckets=recipe.format.bytes * gathered_elements if part_count > 1 else 0,
    )


def _elements_of_first_parts(parameters: Sequence[_Parameter], part_count: int) -> int:
    return sum(parameter.elements_of_first_part(part_count) for parameter in parameters)


def _parameters_of_layer(
    linear_layers: Sequence[tuple[str, int, int]], vector_sizes: Sequence[int]
) -> list[_Parameter]:
    # torch's linear layer has its outputs first.
    return [
        *(_Parameter(outputs, inputs) for _, inputs, outputs in linear_layers),
        *(_Parameter(size, 1) for size in vector_sizes),
    ]


def _parameters_outside_layers(sizes: Sequence[int], width: int) -> list[_Parameter]:
    """Return vectors, and tables and heads of the model's width."""
    return [
        _Parameter(size, 1) if size <= width or size % width else _Parameter(size // width, width)
        for size in sizes
    ]


def _adapter_parameters(recipe: Recipe, shape: ModelShape) -> list[_Parameter]:
    """Return the two matrices of each adapter: r x inputs, outputs x r."""
    lora = recipe.model.lora
    sides = shape.linear_layer_side_sizes_or_none(lora.target_modules) if lora else None
    if lora is None or sides is None:
        return []
    return [
        *(
            _Parameter(lora.r, side) if index % 2 == 0 else _Parameter(side, lora.r)
            for index, side in enumerate(sides)
        ),
        *(_Parameter(side, 1) for side in (sides[1::2] if lora.dora else ())),
    ]
