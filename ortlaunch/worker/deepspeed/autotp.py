"""DeepSpeed's AutoTP: ranks compute each layer together, beside ZeRO 0 to 2.

The layers and their communication are DeepSpeed's. Which layers are sliced is decided by the plan
of transformers and of the recipe, as without DeepSpeed: its own walk over a model takes adapters for
plain layers and drops them, and guesses from names where transformers has no plan.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from ortlaunch.base.errors import InputError
from ortlaunch.base.units import first_names_and_count_of_rest
from ortlaunch.worker.model.named_state import autotp_slices_or_none
from ortlaunch.worker.model.tensor_parallel import (
    TensorSlice,
    planned_model_and_style_by_name,
    slice_of_fused_layers,
)
from ortlaunch.worker.weight_memory import WeightMemory

_LAYER_CLASS_BY_STYLE: dict[str, type[nn.Module]] = {
    "colwise": nn.Linear,
    "colwise_gather_output": nn.Linear,
    "rowwise": nn.Linear,
    "embedding_rowwise": nn.Embedding,
    "replicated_with_grad_allreduce": nn.Module,
    "replicate": nn.Module,
}


class UnslicedLayer(NamedTuple):
    """A layer whose place one of DeepSpeed's took; both have the same parameters."""

    parent: nn.Module
    name: str
    layer: nn.Module

    def put_back(self) -> None:
        """Give the layer its place again, once its parameters are whole."""
        setattr(self.parent, self.name, self.layer)


def slice_layers_by_deepspeed_in_place(
    model: nn.Module, recipe_plan: Mapping[str, str], rank_count: int
) -> list[UnslicedLayer]:
    """Put DeepSpeed's layers, with this rank's slices, in the place of those of a plan (collective).

    Parameters stay the same objects with other values, so that an optimizer may have them.

    Args:
        model: the model that returns its loss, whole and the same on all ranks.
        recipe_plan: styles by patterns of layer names, beside the model's own plan of transformers.
        rank_count: ranks that compute each layer together; they follow each other.

    Raises:
        InputError: a plan that does not fit the model, or that DeepSpeed cannot follow.
    """
    import deepspeed
    from deepspeed.module_inject.layers import LinearAllreduce, LinearLayer, VocabParallelEmbedding
    from deepspeed.utils import groups

    planned_model, style_by_name = planned_model_and_style_by_name(
        model, recipe_plan, rank_count, [*_LAYER_CLASS_BY_STYLE]
    )
    layers = _layers_by_style_or_refuse(planned_model, style_by_name)
    # Its layers communicate by its own module.
    deepspeed.init_distributed(dist_init_required=False)
    deepspeed.set_autotp_mode(training=True)
    groups._init_tp_mesh_device(rank_count)
    group = groups.get_tensor_model_parallel_group()
    unsliced_layers: list[UnslicedLayer] = []
    head_by_weight: dict[int, Any] = {}

    def replace_layer(name: str, new_layer: nn.Module, old_layer: nn.Module) -> None:
        parent_name, _, child_name = name.rpartition(".")
        parent = planned_model.get_submodule(parent_name)
        unsliced_layers.append(UnslicedLayer(parent, child_name, old_layer))
        setattr(parent, child_name, new_layer)

    for style in ("colwise", "colwise_gather_output"):
        for name, layer in layers[style].items():
            sliced = LinearLayer(layer, group, gather_output=style != "colwise", name=name)
            # An embedding with the same weight computes with the same rows.
            sliced.vocab_start_index = sum(sliced._partition_sizes[: sliced.tp_index])
            sliced.vocab_end_index = sliced.vocab_start_index + layer.weight.shape[0]
            head_by_weight[id(layer.weight)] = sliced
            replace_layer(name, sliced, layer)
    for name, layer in layers["rowwise"].items():
        replace_layer(name, LinearAllreduce(layer, group, name=name), layer)
    for name, layer in layers["embedding_rowwise"].items():
        try:
            head = head_by_weight.get(id(layer.weight))
            embedding = VocabParallelEmbedding(
                layer, group, tied_vocab_parallel_linear=head, name=name
            )
        except NotImplementedError as error:
            raise InputError(f"parallel.tensor: {name}: {error}") from error
        replace_layer(name, embedding, layer)
    for layer in layers["replicated_with_grad_allreduce"].values():
        for parameter in layer.parameters():
            if parameter.requires_grad:
                parameter.register_hook(lambda gradient: _sum_over_ranks(gradient, group))
    # DeepSpeed's engine leaves such a model as it is.
    model.ds_autotp_parsed = True  # type: ignore[assignment]
    return unsliced_layers


def _sum_over_ranks(gradient: torch.Tensor, group: Any) -> torch.Tensor:
    summed = gradient.contiguous().clone()
    torch.distributed.all_reduce(summed, group=group)
    return summed


def _layers_by_style_or_refuse(
    model: nn.Module, style_by_name: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    """Return the layers of each style, by name.

    Raises:
        InputError: DeepSpeed has no such layer, or a weight would be both whole and sliced.
    """
    all_layers = dict(model.named_modules())
    parameter_names = {name for name, _ in model.named_parameters()}
    layers: dict[str, dict[str, Any]] = defaultdict(dict)
    refused = []
    for name, style in style_by_name.items():
        if name in all_layers:
            layer = all_layers[name]
            if not isinstance(layer, _LAYER_CLASS_BY_STYLE.get(style, ())):
                refused.append(f"{name} ({type(layer).__name__}, {style})")
            layers[style][name] = layer
        elif name in parameter_names and name.rpartition(".")[0] not in style_by_name:
            refused.append(f"{name} (a parameter, {style})")
    if refused:
        raise InputError(
            "parallel.tensor: DeepSpeed's AutoTP slices linear layers and embeddings, and cannot slice "
            f"{first_names_and_count_of_rest(refused, 4)}; leave out zero, so that transformers slices the "
            "model, or give these layers the style replicate in parallel.tensor_plan"
        )
    _require_tied_layers_sliced_alike(model, layers)
    return layers


def _require_tied_layers_sliced_alike(
    model: nn.Module, layers: Mapping[str, Mapping[str, Any]]
) -> None:
    """Check that all layers that have a sliced weight are sliced along its rows.

    Raises:
        InputError: another layer would compute with a slice as if it were whole.
    """
    names_by_weight = defaultdict(set)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_by_weight[id(parameter)].add(name.rpartition(".")[0])
    sliced_names = {name for style in layers for name in layers[style] if "repl" not in style}
    row_names = sliced_names - {*layers.get("rowwise", ())}
    for names in names_by_weight.values():
        if len(names) > 1 and names & sliced_names and not names <= row_names:
            raise InputError(
                f"parallel.tensor: {' and '.join(sorted(names))} have one weight, and the plan slices only a part of "
                "them, or along their inputs; give both a style in parallel.tensor_plan: embedding_rowwise "
                "and colwise_gather_output"
            )


def slice_of_autotp_rank(parameter: torch.Tensor, tensor_index: int) -> TensorSlice | None:
    """Return one rank's slice of a parameter that AutoTP has sliced; None: each rank has it whole."""
    slices = autotp_slices_or_none(parameter)
    if slices is None:
        return None
    return slice_of_fused_layers(
        slices.shape,
        slices.dimension,
        sum(slices.sizes[:tensor_index]),
        slices.sizes[tensor_index],
    )


@torch.no_grad()
def make_parameters_whole(
    model: nn.Module, keeps_values: bool, weight_memory: WeightMemory
) -> None:
    """Gather one sliced parameter after another, on the host (collective).

    The model cannot be called until its layers have been put back, and only where values are kept.

    Args:
        keeps_values: whether this rank keeps the values; the others give theirs.
        weight_memory: where.
    """
    for parameter in model.parameters():
        if autotp_slices_or_none(parameter) is not None:
            sliced: Any = parameter
            sliced.gather_params([sliced])
            parameter.data = (
                weight_memory.tensor_in_memory_or_file(parameter.data.cpu())
                if keeps_values
                else parameter.data.new_empty(0)
            )
