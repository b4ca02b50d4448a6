"""Bytes of the weights that `model.quantize` keeps in 4 or 8 bits, as bitsandbytes stores them."""

from __future__ import annotations

from typing import NamedTuple

from ortlaunch.launch_plan import Bytes
from ortlaunch.planning.model_sizes import ModelShape
from ortlaunch.recipe.fields.model import Quantize
from ortlaunch.tables.precisions import PRECISIONS

# Values of nf4 that share a scale, and scales that share one of `double`.
_BLOCK = 64
_SCALE_BLOCK = 256
_FLOAT32_BYTES = 4
# Each layer has the 16 values of nf4; with `double` 256 values of scales, and their mean.
_VALUE_TABLE_BYTES = 4 * 16
_SCALE_TABLE_BYTES = 4 * (256 + 1)


class QuantizedLayers(NamedTuple):
    """The quantized layers of a model."""

    element_count: int
    """The weights that they stand for."""
    packed_bytes: int
    """Their bytes, without scales."""
    scale_bytes: int
    """Their scales."""
    block_bytes: int
    """The packed bytes of one of the model's repeated blocks."""
    unpacked_layer_bytes: int
    """The bytes of the largest one while it is multiplied."""

    def add_to_stage(self, stage_bytes: Bytes, shard_count: int) -> Bytes:
        """Return the bytes of a rank with these layers, each divided over `shard_count` ranks.

        FSDP2 divides them without their scales, and has two blocks gathered, each twice.
        """
        return stage_bytes._replace(
            weights=stage_bytes.weights + self.scale_bytes + -(-self.packed_bytes // shard_count),
            activations=stage_bytes.activations + self.unpacked_layer_bytes,
            buckets=stage_bytes.buckets + (4 * self.block_bytes if shard_count > 1 else 0),
        )


def planned_quantized_layers(
    quantize: Quantize, model_shape: ModelShape, precision: str
) -> QuantizedLayers:
    """Return the sizes of a model's quantized layers.

    Args:
        quantize: the recipe's `model.quantize`.
        model_shape: the model before it is quantized.
        precision: the recipe's `precision`.
    """
    layer_sides = model_shape.block_layer_sides()
    element_counts = [inputs * outputs for inputs, outputs in layer_sides]
    if quantize.type == "int8":
        packed_bytes = sum(element_counts)
        scale_bytes = _FLOAT32_BYTES * sum(outputs for _, outputs in layer_sides)
    else:
        packed_bytes = sum(-(-count // 2) for count in element_counts)
        scale_bytes = sum(_nf4_scale_bytes(count, quantize.double) for count in element_counts)
    value_bytes = PRECISIONS[quantize.compute or precision].bytes
    return QuantizedLayers(
        sum(element_counts),
        packed_bytes,
        scale_bytes,
        packed_bytes // sum(group.layer_count for group in model_shape.layer_groups),
        value_bytes * max(element_counts, default=0),
    )


def _nf4_scale_bytes(element_count: int, has_double_scales: bool) -> int:
    scale_count = -(-element_count // _BLOCK)
    scale_bytes = (
        scale_count + _FLOAT32_BYTES * -(-scale_count // _SCALE_BLOCK) + _SCALE_TABLE_BYTES
        if has_double_scales
        else _FLOAT32_BYTES * scale_count
    )
    return scale_bytes + _VALUE_TABLE_BYTES
