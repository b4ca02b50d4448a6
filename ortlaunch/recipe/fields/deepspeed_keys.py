"""DeepSpeed's JSON keys.

Some may be set raw under `zero.deepspeed`. Others are set by recipe fields. The names are those of
DeepSpeed 0.19.8. DeepSpeed silently ignores an unknown top-level key, and refuses an unknown nested
key only after every rank has started. Has no side effects.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ortlaunch.recipe.fields.recipe import Recipe
from ortlaunch.recipe.fields.zero import Zero
from ortlaunch.recipe.text.closest_names import closest_or_translated_name_or_none
from ortlaunch.recipe.text.source_location import Problem

# DeepSpeed's name -> the recipe's field. Setting one of these raw is refused, because two places
# for one value could disagree.
DEEPSPEED_OWNED = {
    "train_batch_size": "batch.global_size",
    "train_micro_batch_size_per_gpu": "batch.micro_size",
    "gradient_accumulation_steps": "batch.accumulation_steps",
    "gradient_clipping": "train.max_grad_norm",
    "optimizer": "optimizer",
    "scheduler": "schedule",
    "steps_per_print": "log.every_steps",
    "zero_optimization.stage": "zero.stage",
    "zero_optimization.cpu_offload": "zero.offload.optimizer",
    "zero_optimization.cpu_offload_param": "zero.offload.parameters",
    "zero_optimization.cpu_offload_use_pin_memory": "zero.offload.pin_memory",
    "zero_optimization.offload_optimizer.device": "zero.offload.optimizer",
    "zero_optimization.offload_optimizer.nvme_path": "zero.offload.nvme_path",
    "zero_optimization.offload_optimizer.pin_memory": "zero.offload.pin_memory",
    "zero_optimization.offload_param.device": "zero.offload.parameters",
    "zero_optimization.offload_param.nvme_path": "zero.offload.nvme_path",
    "zero_optimization.offload_param.pin_memory": "zero.offload.pin_memory",
    "fp16.enabled": "precision",
    "bf16.enabled": "precision",
    "bfloat16": "precision",
    "tensorboard": "log.trackers",
    "tensor_parallel": "parallel.tensor",
}
_REFUSED = {
    "pipeline": "is not supported: there is no pipeline parallelism here; zero.stage shards over the "
    "ranks",
}


def _split_words(text: str) -> list[str]:
    return text.split()


# Known top-level keys of DeepSpeed, without the owned ones. A recipe may set them raw, except those
# in _REFUSED.
TOP_LEVEL_KEYS = _split_words("""
    activation_checkpointing aio amp autotuning bf16 checkpoint comms_logger communication_data_type compile
    compression_training curriculum_learning data_efficiency data_types dataloader_drop_last disable_allgather
    dump_state elasticity eigenvalue flops_profiler fp16 fp32_allreduce grad_accum_dtype gradient_predivide_factor
    hybrid_engine load_universal_checkpoint memory_breakdown nebula pipeline pld prescale_gradients
    progressive_layer_drop seq_parallel_communication_data_type sparse_attention sparse_gradients
    timers torch_autocast use_data_before_expert_parallelism use_node_local_storage wall_clock_breakdown
    weight_quantization zero_allow_untested_optimizer zero_force_ds_cpu_optimizer zero_optimization
""")

# The known keys of some sections. In other sections any key is accepted; only the value `auto` is
# refused.
NESTED_KEYS = {
    "fp16": _split_words("""
        auto_cast consecutive_hysteresis enabled fp16_master_weights_and_grads hysteresis initial_scale_power
        loss_scale loss_scale_window min_loss_scale
    """),
    "bf16": _split_words("""
        bf16_master_weights_and_grads bf16_optimizer_states check_grad_overflow enabled immediate_grad_update
    """),
    "zero_optimization": _split_words("""
        allgather_bucket_size allgather_partitions allgather_sequential compute_grad_norm contiguous_gradients
        cpu_offload cpu_offload_param cpu_offload_use_pin_memory elastic_checkpoint enable_sanity_checks
        gather_16bit_weights_on_model_save ignore_unused_parameters leaf_module legacy_stage1 load_from_fp32_weights
        log_trace_cache_warnings max_live_parameters max_reuse_distance memory_efficient_linear
        model_persistence_threshold module_granularity_threshold offload_optimizer offload_param overlap_comm
        override_module_apply param_persistence_threshold parameter_alignment pipeline_loading_checkpoint
        prefetch_bucket_size reduce_bucket_size reduce_scatter round_robin_gradients
        save_muon_momentum_buffer_in_memory stage stage3_allgather_sequential
        stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save
        stage3_max_live_parameters stage3_max_reuse_distance stage3_model_persistence_threshold
        stage3_module_granularity_threshold stage3_param_persistence_threshold stage3_prefetch_bucket_size
        stage3_use_all_reduce_for_fetch_params sub_group_size use_all_reduce_for_fetch_params
        use_multi_rank_bucket_allreduce zenflow zero_hpz_partition_size zero_quantized_gradients
        zero_quantized_nontrainable_weights zero_quantized_weights
    """),
    "zero_optimization.offload_optimizer": _split_words("""
        buffer_count cpuadam_cores_perc device fast_init nvme_path pin_memory pipeline_read pipeline_write ratio
        super_offload
    """),
    "zero_optimization.offload_param": _split_words("""
        buffer_count buffer_size device max_in_cpu nvme_path pin_memory
    """),
}

# Name of a setting -> the recipe's path for it, for hints about misplaced keys. Only unambiguous
# names.
# A name without an underscore (`stage`, `enabled`) could mean a field of another section.
PATH_BY_SETTING = {
    name: DEEPSPEED_OWNED.get(path, f"zero.deepspeed.{path}")
    for section, names in {
        "": TOP_LEVEL_KEYS,
        "zero_optimization.": NESTED_KEYS["zero_optimization"],
        "fp16.": NESTED_KEYS["fp16"],
    }.items()
    for name in names
    for path in (f"{section}{name}",)
    if "_" in name
}


def deepspeed_rules(recipe: Recipe) -> Iterator[Problem]:
    """Yield the problems of the raw settings and of `zero.offload`."""
    if recipe.zero:
        yield from _raw_deepspeed_key_rules(recipe.zero.deepspeed, "")
        yield from _zero_offload_rules(recipe.zero)


def _zero_offload_rules(zero: Zero) -> Iterator[Problem]:
    offload = zero.offload
    if offload is None:
        return
    devices = {"optimizer": offload.optimizer, "parameters": offload.parameters}
    for tensor_kind, device in devices.items():
        # ZeRO shards parameters at stage 3 only, and its NVMe swapping exists at that stage only.
        least_stage = 3 if tensor_kind == "parameters" or device == "nvme" else 1
        if device and zero.stage < least_stage:
            key_names = (f"zero.offload.{tensor_kind}", "zero.stage")
            yield (
                key_names,
                f"got {device} with ZeRO {zero.stage}; DeepSpeed supports this from stage "
                f"{least_stage} on",
            )
    if not any(devices.values()):
        yield (
            ("zero.offload",),
            "offloads nothing; give optimizer: cpu or parameters: cpu, or write null",
        )
    elif "nvme" in devices.values() and not offload.nvme_path:
        yield (
            ("zero.offload.nvme_path",),
            "is missing: nvme needs a folder on a fast local disk of every host",
        )
    elif offload.nvme_path and "nvme" not in devices.values():
        yield ("zero.offload.nvme_path",), "has no effect without nvme; leave it out"


def _raw_deepspeed_key_rules(raw_settings: dict[str, Any], section_path: str) -> Iterator[Problem]:
    # None: NESTED does not list this section, so no key in it is reported as unknown.
    known_keys = (
        NESTED_KEYS.get(section_path) if section_path else [*TOP_LEVEL_KEYS, *DEEPSPEED_OWNED]
    )
    for key, value in raw_settings.items():
        setting_path = f"{section_path}.{key}" if section_path else key
        key_names = (f"zero.deepspeed.{setting_path}",)
        if setting_path in DEEPSPEED_OWNED:
            yield key_names, f"is set by the recipe: change {DEEPSPEED_OWNED[setting_path]} instead"
        elif setting_path in _REFUSED:
            yield key_names, _REFUSED[setting_path]
        elif known_keys is not None and key not in known_keys:
            closest_key = closest_or_translated_name_or_none(key, known_keys)
            yield (
                key_names,
                "unknown DeepSpeed key" + (f"; did you mean {closest_key}?" if closest_key else ""),
            )
        elif value == "auto":
            yield (
                key_names,
                "got auto, which only Hugging Face's Trainer fills in; leave it out for "
                "DeepSpeed's default",
            )
        elif isinstance(value, dict):
            yield from _raw_deepspeed_key_rules(value, setting_path)
        elif setting_path in NESTED_KEYS and value is not None:
            yield (
                key_names,
                f"got {str(value).lower()}; it must be a mapping, as in DeepSpeed's JSON",
            )
