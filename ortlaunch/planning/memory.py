"""Count the parameters of a recipe's model, and estimate the memory of a rank.

The input is the recipe alone, with the config.json of a pretrained model if it is on this host.
Weights, gradients and optimizer state are exact: tests/worker/engine/test_memory_use_ranks.py
compares them with the live tensors of two ranks. Activations (activations.py) and overhead are
estimates. For models whose family is not in model_sizes.py the result is None; the worker measures
them in the run.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from ortlaunch.launch_plan import USUAL_PROCESS, Bytes, Memory, ProcessMemory
from ortlaunch.planning.activations import peak_activation_bytes_of_rank, sample_tokens
from ortlaunch.planning.fsdp_memory import bytes_of_fsdp2_rank, config_of_tensor_slice
from ortlaunch.planning.model_sizes import ModelShape, build_model_shape
from ortlaunch.planning.quantized_layers import QuantizedLayers, planned_quantized_layers
from ortlaunch.planning.startup import (
    peak_device_bytes_before_first_step,
    planned_load_snapshot_and_offload_bytes_of_rank,
    state_bytes_per_parameter,
)
from ortlaunch.recipe import Recipe
from ortlaunch.recipe.fields.data import TokenizerTraining
from ortlaunch.recipe.fields.model import Lora
from ortlaunch.recipe.fields.pretrained import read_local_model_config_or_none
from ortlaunch.recipe.inputs import rounded_vocabulary_size
from ortlaunch.recipe.rules.loss_chunks import loss_chunk_rows_if_recipe_allows
from ortlaunch.recipe.rules.parity import parity_step_count_and_reason
from ortlaunch.tables.families import FAMILIES, Family, PlannedConfig, planned_config_or_none

# Overhead of a process on a CPU: its peak memory without the counted tensors, by engine. It is the
# sum of a number of bytes and of three shares: of the model's bytes, of the activations that are
# kept for the backward pass, and of all activations, recomputed ones included. A plan should rather
# be too high: fitted to memory.json of 60 runs of seven families (78 to 646 MiB, torch 2.13, glibc
# 2.36), of which most take 0.75 to 1.0 of it; engine ort's was lowered after BERT and Llama of two
# sizes had taken 0.71 to 0.88 of it, and take 0.8 to 1.02 now. The last share is the fragmentation of the heap on
# engine eager, which recomputed layers cause, too.
_OVERHEAD_BY_ENGINE = {
    "eager": (15 << 20, 0.0, 0.0, 0.6),
    "inductor": (100 << 20, 0.0, 0.2, 0.0),
    "ort": (60 << 20, 0.4, 0.35, 0.0),
}
# Activations of plain PyTorch's pass that are in memory beside the engine's, as a share, while a
# step is compared; the heap keeps a part of them.
_COMPARED_SHARE = 1.0
# DeepSpeed's modules without MLflow and TorchInductor, which no run imports, and its engine: 17 to 29
# MiB beside a run without it, at the tiny recipes.
_DEEPSPEED_BYTES = 25 << 20
# Modules that an evaluation of classes, numbers or transcripts imports: 29 to 36 MiB.
_TORCHMETRICS_BYTES = 35 << 20
# Added on engine ort for Llama, whose graph has many nodes for RMSNorm and rotary positions, and
# added (again) for adapters.
_MORE_NODES_BYTES = 15 << 20
# GPU memory beside tensors, not measured: CUDA's context with torch's kernels; workspaces of cuBLAS
# and cuDNN, which torch and ONNX Runtime each have on engine ort; NCCL's buffers.
_CUDA_CONTEXT_BYTES = 500 << 20
_WORKSPACE_BYTES = 100 << 20
_NCCL_BYTES = 300 << 20
# DeepSpeed's defaults, in elements: the largest tensor that ZeRO 3 keeps whole on every rank; the
# elements reduced together; the elements that ZeRO 3 gathers together.
_PERSISTENT_ELEMENTS = 100_000
# With them, adapters have sizes that the recipe and the model's family do not give.
_UNPLANNED_LORA_FIELDS = ("pretrained", "modules_to_save", "target_parameters", "rank_pattern")
_BUCKET_ELEMENTS = 500_000_000
_LIVE_ELEMENTS = 1_000_000_000


def merged_model_config_or_none_if_defaults_unknown(recipe: Recipe) -> PlannedConfig | None:
    """Return the model's config with every default, or None if only transformers knows them."""
    recipe_config = recipe.model.config or {}
    pretrained_config = (
        read_local_model_config_or_none(recipe.model.pretrained) if recipe.model.pretrained else {}
    )
    merged_config = _model_config_fields_known_before_loading(recipe)
    family = FAMILIES.get(str(merged_config.get("model_type")))
    # If the model's own config is not known, the recipe must have all sizes.
    if family is None or (
        pretrained_config is None and not set(recipe_config) >= set(family.size_fields)
    ):
        return None
    return planned_config_or_none(merged_config)


def _model_config_fields_known_before_loading(recipe: Recipe) -> dict[str, object]:
    """Return the fields of the model's config that its files and the recipe give."""
    own = recipe.model.config or {}
    known = (
        read_local_model_config_or_none(recipe.model.pretrained) if recipe.model.pretrained else {}
    )
    given = {**(known or {}), **own}
    tokenizer = recipe.data.tokenizer
    if (
        not recipe.model.pretrained
        and isinstance(tokenizer, TokenizerTraining)
        and "vocab_size" not in own
    ):
        given["vocab_size"] = rounded_vocabulary_size(tokenizer.vocab_size)
    return given


def assumed_model_sizes_text_or_empty(recipe: Recipe) -> str:
    """Return what a plan assumes of the model's sizes before the data are read; "" for nothing."""
    own = recipe.model.config or {}
    tokenizer = recipe.data.tokenizer
    parts = []
    if (
        isinstance(tokenizer, TokenizerTraining)
        and not recipe.model.pretrained
        and "vocab_size" not in own
    ):
        parts.append(f"at most {tokenizer.vocab_size:,} tokens of data.tokenizer")
    if (
        recipe.model.traits.has_classes
        and "num_labels" not in _model_config_fields_known_before_loading(recipe)
    ):
        parts.append("2 classes (model.config.num_labels)")
    return " and ".join(parts)


def estimate_rank_memory_or_none(
    recipe: Recipe,
    micro_samples: int,
    rank_count: int,
    device: str = "cpu",
    process_memory: ProcessMemory = USUAL_PROCESS,
    copy_rank_count: int | None = None,
) -> Memory | None:
    """Return the memory of a rank, for each sharding, on `rank_count` data-parallel ranks.

    Args:
        recipe: the recipe.
        micro_samples: samples of a micro batch.
        rank_count: data-parallel ranks.
        device: cpu or cuda.
        process_memory: bytes of a rank's process beside its model.
        copy_rank_count: ranks that share a copy of the model with `parallel`; None: all.

    Returns:
        None for models that are not known here.
    """
    config = merged_model_config_or_none_if_defaults_unknown(recipe)
    if config is None:
        return None
    family = FAMILIES[config["model_type"]]
    if not family.can_predict(recipe.model.traits.predicts) or (
        family.tasks and recipe.model.task not in family.tasks
    ):
        return None
    compared_step_count = parity_step_count_and_reason(recipe, config["model_type"]).steps
    model_shape = build_model_shape(config, recipe.model.task)
    sizes = _tensor_sizes_or_none(recipe, model_shape)
    if sizes is None:
        return None
    quantized = QuantizedLayers(0, 0, 0, 0, 0)
    if recipe.model.quantize:
        quantized = planned_quantized_layers(recipe.model.quantize, model_shape, recipe.precision)
    parameter_count, trainable_count = sum(sizes.all), sum(sizes.trained)
    # An evaluation may have fewer ranks (planning/mesh.py).
    autotp_count = math.gcd(recipe.autotp_rank_count, copy_rank_count or rank_count)
    autotp_config = config_of_tensor_slice(config, autotp_count)
    sliced_sizes = (
        _tensor_sizes_or_none(recipe, build_model_shape(autotp_config, recipe.model.task)) or sizes
    )
    sliced_trainable_count = sum(sliced_sizes.trained)
    data_rank_count = rank_count // autotp_count
    # Without DeepSpeed, 4 bytes in every precision: autocast keeps norms and softmax in float32.
    kept_activation_bytes = peak_activation_bytes_of_rank(recipe, config, micro_samples, 4, device)
    recipe_without_recomputation = recipe.model_copy(
        update={
            "model": recipe.model.model_copy(update={"gradient_checkpointing": False}),
            "engine": recipe.engine.model_copy(update={"memory_optimization": 0}),
        }
    )
    value_bytes = _bytes_per_value(recipe) if recipe.zero else 4
    all_activations = peak_activation_bytes_of_rank(
        recipe_without_recomputation, config, micro_samples, value_bytes, device
    )
    bytes_by_stage: list[tuple[str, Bytes]] = [
        (
            "DDP",
            _training_bytes_without_deepspeed(
                recipe, parameter_count, trainable_count, kept_activation_bytes
            ),
        )
    ]
    kept_activation_bytes = peak_activation_bytes_of_rank(
        recipe, autotp_config, micro_samples, _bytes_per_value(recipe), device
    )
    for stage in range(4):
        tensors_of_stage = _bytes_left_on_device_by_zero_offload(
            recipe,
            _training_bytes_in_zero_stage(
                recipe,
                sliced_sizes.all,
                sliced_trainable_count,
                kept_activation_bytes,
                stage,
                data_rank_count,
            ),
            sliced_trainable_count,
            stage,
            device,
        )
        bytes_by_stage.append(
            (
                f"ZeRO {stage}",
                tensors_of_stage._replace(
                    buckets=_deepspeed_buffer_bytes(
                        recipe,
                        sum(sliced_sizes.all),
                        sliced_trainable_count,
                        stage,
                        data_rank_count,
                        device,
                    )
                ),
            )
        )
    offloaded_bytes, part_count = 0, 1
    if recipe.parallel is not None and recipe.has_fsdp2:
        copy_rank_count = copy_rank_count or rank_count
        tensor_count = math.gcd(recipe.parallel.tensor, copy_rank_count)
        part_count = copy_rank_count // tensor_count
        slice_config = config_of_tensor_slice(config, tensor_count)
        fsdp_bytes = bytes_of_fsdp2_rank(
            recipe,
            slice_config,
            peak_activation_bytes_of_rank(recipe, slice_config, micro_samples, 4, device),
            part_count,
        )
        # On a CPU an offload moves nothing.
        if recipe.parallel.offload and device == "cuda":
            offloaded_bytes = fsdp_bytes.model
            fsdp_bytes = fsdp_bytes._replace(weights=0, gradients=0, optimizer=0)
        bytes_by_stage = [*bytes_by_stage[:1], ("FSDP2", fsdp_bytes)]
    compared_bytes = 0
    # A divided model is compared on the CPU of rank 0, before it is divided.
    if compared_step_count and recipe.parallel is None:
        eager_engine = recipe.engine.model_copy(update={"name": "eager", "memory_optimization": 0})
        eager_recipe = recipe.model_copy(update={"engine": eager_engine})
        compared_bytes = 2 * _bytes_per_value(recipe) * trainable_count
        # torch's allocator of a GPU uses the freed blocks of one pass for the other.
        if device == "cpu":
            eager_activation_bytes = peak_activation_bytes_of_rank(
                eager_recipe, config, micro_samples, _bytes_per_value(recipe), device
            )
            compared_bytes += int(_COMPARED_SHARE * eager_activation_bytes)
    if recipe.model.quantize:
        bytes_by_stage = [
            (stage, quantized.add_to_stage(stage_bytes, part_count if stage == "FSDP2" else 1))
            for stage, stage_bytes in bytes_by_stage
        ]
    gpu_library_bytes = _gpu_library_bytes(recipe, rank_count)
    bytes_by_stage = [
        (
            stage,
            stage_bytes._replace(
                overhead=compared_bytes
                + (
                    _process_overhead_bytes_of_costliest_engine(
                        recipe, stage_bytes, family, all_activations
                    )
                    if device == "cpu"
                    else gpu_library_bytes
                )
            ),
        )
        for stage, stage_bytes in bytes_by_stage
    ]
    chosen_stage = f"ZeRO {recipe.zero.stage}" if recipe.zero else "DDP"
    if recipe.has_fsdp2:
        chosen_stage = "FSDP2"
    host_memory = planned_load_snapshot_and_offload_bytes_of_rank(
        recipe, parameter_count, trainable_count, value_bytes, rank_count, device
    )
    loss_chunk_rows = loss_chunk_rows_if_recipe_allows(
        recipe,
        micro_samples * sample_tokens(recipe, config),
        int(config["vocab_size"]),
        device,
    )
    return Memory(
        parameter_count + quantized.element_count,
        trainable_count,
        process_memory,
        tuple(bytes_by_stage),
        chosen_stage,
        (4 + state_bytes_per_parameter(recipe)) * trainable_count,
        loss_chunk_rows,
        compared_bytes,
        peak_device_bytes_before_first_step(
            recipe,
            sliced_sizes.all,
            sliced_trainable_count,
            value_bytes,
            (copy_rank_count if recipe.has_fsdp2 else None) or data_rank_count,
        )
        + quantized.packed_bytes
        + quantized.scale_bytes,
        host_memory._replace(
            built=host_memory.built + quantized.packed_bytes + quantized.scale_bytes,
            offloaded=host_memory.offloaded + offloaded_bytes,
        ),
    )


class _TensorSizes(NamedTuple):
    """The elements of each tensor of a model, without quantized ones."""

    all: list[int]
    trained: list[int]


def _tensor_sizes_or_none(recipe: Recipe, model_shape: ModelShape) -> _TensorSizes | None:
    """Return the sizes of a model or of its slices; None: an unknown target of the adapters."""
    unpacked_shape = (
        model_shape.shape_without_block_layers() if recipe.model.quantize else model_shape
    )
    tensor_sizes = unpacked_shape.parameter_element_counts()
    if recipe.model.lora is None:
        return _TensorSizes(tensor_sizes, tensor_sizes)
    adapter_sizes = _adapter_tensor_sizes_or_none(recipe.model.lora, model_shape)
    if adapter_sizes is None:
        return None
    return _TensorSizes([*tensor_sizes, *adapter_sizes], adapter_sizes)


def _gpu_library_bytes(recipe: Recipe, rank_count: int) -> int:
    """Return the GPU memory of libraries: CUDA contexts, workspaces, NCCL."""
    uses_ort = recipe.engine.name in ("ort", "auto")
    return (
        _CUDA_CONTEXT_BYTES
        + _WORKSPACE_BYTES * (2 if uses_ort else 1)
        + (_NCCL_BYTES if rank_count > 1 else 0)
    )


def _process_overhead_bytes_of_costliest_engine(
    recipe: Recipe,
    counted_bytes: Bytes,
    family: Family,
    activation_bytes_without_recomputation: int,
) -> int:
    """Return the bytes of a process beside the counted tensors (see _OVERHEAD).

    For engine `auto` this is the largest of all engines.

    Args:
        recipe: the recipe.
        counted_bytes: the counted bytes.
        family: the model's row of the table.
        activation_bytes_without_recomputation: bytes of activations, recomputed ones included.
    """
    engine_names = _OVERHEAD_BY_ENGINE if recipe.engine.name == "auto" else [recipe.engine.name]
    module_bytes = _DEEPSPEED_BYTES if recipe.zero else 0
    traits = recipe.model.traits
    if recipe.data.evaluation is not None and (traits.label or traits.media or traits.compares):
        module_bytes += _TORCHMETRICS_BYTES
    return module_bytes + max(
        int(
            fixed_bytes
            + model_factor * counted_bytes.model
            + kept_factor * counted_bytes.activations
            + all_factor * activation_bytes_without_recomputation
        )
        + (
            _MORE_NODES_BYTES * (family.has_llama_layers + (recipe.model.lora is not None))
            if engine_name == "ort"
            else 0
        )
        for engine_name in engine_names
        for fixed_bytes, model_factor, kept_factor, all_factor in [_OVERHEAD_BY_ENGINE[engine_name]]
    )


def reason_rank_memory_cannot_be_estimated(recipe: Recipe) -> str:
    """Return the reason why `estimate` returns None for the recipe, and a remedy."""
    model = recipe.model
    if model.traits.is_own:
        return "your factory builds the model; a training records its memory in memory.json"
    pretrained_config = (
        read_local_model_config_or_none(model.pretrained) if model.pretrained else {}
    )
    if pretrained_config is None:
        repository, _, revision = str(model.pretrained).partition("@")
        return (
            f"the config of {model.pretrained} is not on this host, and a plan does not contact "
            f"the hub; give a local folder, or download it once: hf download {repository} "
            f"config.json{f' --revision {revision}' if revision else ''}"
        )
    model_type = {**pretrained_config, **(model.config or {})}.get("model_type")
    if model_type not in FAMILIES:
        return f"models of type {model_type} have no estimate; a training records its memory in memory.json"
    if merged_model_config_or_none_if_defaults_unknown(recipe) is None:
        fields = _model_config_fields_known_before_loading(recipe)
        needed = FAMILIES[model_type].size_fields
        missing = ", ".join(name for name in needed if fields.get(name) is None)
        return (
            f"a plan needs {missing or 'other sizes'} of a {model_type} in model.config, as its "
            "config.json has them; a training records its memory in memory.json"
        )
    if model.lora is None:
        return f"models of type {model_type} have no estimate for task {model.task}"
    lora = model.lora
    lora_field = next(filter(lora.__getattribute__, _UNPLANNED_LORA_FIELDS), "target_modules")
    return (
        f"adapters with these model.lora.{lora_field} have no estimate; a training records its memory "
        "in memory.json"
    )


def _training_bytes_without_deepspeed(
    recipe: Recipe, parameter_count: int, trainable_count: int, activation_byte_count: int
) -> Bytes:
    """Return the bytes of a training without DeepSpeed.

    Weights stay in float32: without DeepSpeed a lower precision is that of autocast.
    """
    return Bytes(
        4 * parameter_count,
        4 * trainable_count,
        state_bytes_per_parameter(recipe) * trainable_count,
        activation_byte_count,
    )


def _bytes_per_value(recipe: Recipe) -> int:
    return recipe.format.bytes


def _training_bytes_in_zero_stage(
    recipe: Recipe,
    tensor_sizes: list[int],
    trainable_count: int,
    activation_byte_count: int,
    zero_stage: int,
    rank_count: int,
) -> Bytes:
    """Return the bytes of a rank in a ZeRO stage, without offload."""
    value_bytes = _bytes_per_value(recipe)
    # DeepSpeed keeps a float32 master copy beside the weights: in a 16-bit precision in every
    # stage, in fp32 from stage 1 on.
    master_value_bytes = 0 if zero_stage == 0 and value_bytes == 4 else 4
    optimizer_bytes = (master_value_bytes + state_bytes_per_parameter(recipe)) * trainable_count
    gradient_bytes = value_bytes * trainable_count
    gradient_share_bytes = -(-value_bytes * trainable_count // rank_count)
    # ORTModule returns all gradients together, before stage 2 can keep only this rank's share.
    returns_all_gradients = (
        zero_stage == 2 and rank_count > 1 and recipe.engine.name in ("ort", "auto")
    )
    return Bytes(
        weights=value_bytes
        * (
            sum(tensor_sizes)
            if zero_stage < 3
            else _elements_kept_by_zero_3(recipe, tensor_sizes, rank_count)
        ),
        gradients=gradient_share_bytes + (gradient_bytes if returns_all_gradients else 0)
        if zero_stage >= 2
        else gradient_bytes,
        optimizer=-(-optimizer_bytes // (rank_count if zero_stage >= 1 else 1)),
        activations=activation_byte_count,
    )


def _bytes_left_on_device_by_zero_offload(
    recipe: Recipe, stage_bytes: Bytes, trainable_count: int, zero_stage: int, device: str
) -> Bytes:
    """Return the part of a stage's bytes that is left on the device with `zero.offload`.

    On a CPU it is all of them: offloaded tensors are in the same memory.
    """
    offload = recipe.zero.offload if recipe.zero and device == "cuda" else None
    if offload is None or not zero_stage:
        return stage_bytes
    if offload.optimizer:
        # From stage 2 on, each gradient leaves the GPU before the next one is computed, except on
        # engine ort, which computes all of them first.
        keeps_gradients = recipe.engine.name in ("ort", "auto") or zero_stage < 2
        stage_bytes = stage_bytes._replace(
            optimizer=0,
            gradients=_bytes_per_value(recipe) * trainable_count if keeps_gradients else 0,
        )
    return (
        stage_bytes._replace(weights=0) if offload.parameters and zero_stage == 3 else stage_bytes
    )


def _elements_kept_by_zero_3(recipe: Recipe, tensor_sizes: list[int], rank_count: int) -> int:
    """Return the number of elements that ZeRO 3 keeps on each rank.

    A rank has its piece of every tensor. In addition it keeps each small tensor in full, once that
    has been gathered.
    """
    persistence_threshold = int(
        _zero_setting(recipe, "stage3_param_persistence_threshold", _PERSISTENT_ELEMENTS)
    )
    return sum(-(-size // rank_count) for size in tensor_sizes) + sum(
        size for size in tensor_sizes if size <= persistence_threshold
    )


def _deepspeed_buffer_bytes(
    recipe: Recipe,
    parameter_count: int,
    trainable_count: int,
    zero_stage: int,
    rank_count: int,
    device: str,
) -> int:
    """Return the bytes of DeepSpeed's buffers.

    They hold gradients that are reduced and, in stage 3 on a GPU, weights that are gathered.
    """
    bucket_elements = (
        int(_zero_setting(recipe, "reduce_bucket_size", _BUCKET_ELEMENTS))
        if zero_stage
        else _BUCKET_ELEMENTS
    )
    gathered_elements = 0
    # On a CPU only the written part of a buffer takes memory; on a GPU it is allocated in full.
    if zero_stage == 0 or device == "cpu":
        bucket_elements = min(bucket_elements, trainable_count)
    elif zero_stage == 3:
        gathered_elements = min(
            int(_zero_setting(recipe, "stage3_max_live_parameters", _LIVE_ELEMENTS)),
            parameter_count,
        )
    return (
        _bytes_per_value(recipe) * (bucket_elements + gathered_elements)
        if rank_count > 1 or zero_stage
        else 0
    )


def _zero_setting(recipe: Recipe, setting_name: str, default: float) -> float:
    """Return a setting of the section zero_optimization of DeepSpeed's config, or the default."""
    section = recipe.zero.deepspeed.get("zero_optimization", {}) if recipe.zero else {}
    value = section.get(setting_name, default) if isinstance(section, dict) else default
    return value if isinstance(value, (int, float)) else default


def _adapter_tensor_sizes_or_none(lora: Lora, model_shape: ModelShape) -> list[int] | None:
    """Return the number of elements of each tensor of the adapters; None: an unknown target."""
    if any(getattr(lora, name) for name in _UNPLANNED_LORA_FIELDS):
        return None
    side_sizes = model_shape.linear_layer_side_sizes_or_none(lora.target_modules)
    if side_sizes is None:
        return None
    # Each adapter has two matrices, of r x input and output x r elements, and with DoRA lengths.
    return [
        *(lora.r * side_size for side_size in side_sizes),
        *(side_sizes[1::2] if lora.dora else ()),
    ]
