"""The only module that writes DeepSpeed's JSON names. Pure.

All values come from the recipe and the plan's batch, so that there is one source; the recipe's raw
`zero.deepspeed` is merged last.
"""

from __future__ import annotations

from collections.abc import Mapping

from ortlaunch.recipe import Recipe
from ortlaunch.recipe.fields.zero import Offload

# Steps between two prints of DeepSpeed: more than any run has.
NEVER_STEPS = 10**9


def deepspeed_config_or_none(
    recipe: Recipe,
    micro_samples: int,
    accumulation_steps: int,
    rank_count: int,
    tensor_rank_count: int = 1,
) -> dict[str, object] | None:
    """Return the DeepSpeed config of a recipe, or None where it trains without DeepSpeed.

    Args:
        recipe: the run's.
        micro_samples: samples of a pass.
        accumulation_steps: passes in an optimizer step.
        rank_count: data-parallel ranks.
        tensor_rank_count: ranks that compute each layer together, by AutoTP.
    """
    if recipe.zero is None:
        return None
    config: dict[str, object] = {
        "train_batch_size": micro_samples * accumulation_steps * rank_count,
        "train_micro_batch_size_per_gpu": micro_samples,
        "gradient_accumulation_steps": accumulation_steps,
        "zero_optimization": {"stage": recipe.zero.stage, **_offload_sections(recipe.zero.offload)},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": NEVER_STEPS,
        # Always written: without the field, DeepSpeed clips to 1.0.
        "gradient_clipping": recipe.train.max_grad_norm or 0.0,
    }
    if tensor_rank_count > 1:
        config["tensor_parallel"] = {"autotp_size": tensor_rank_count}
    if recipe.format.is_narrow:
        config[recipe.precision] = {"enabled": True}
    return _merge_settings_recursively(config, recipe.zero.deepspeed)


def _offload_sections(offload: Offload | None) -> dict[str, object]:
    """Return DeepSpeed's sections for tensors that are kept off the GPU."""
    if offload is None:
        return {}
    common_settings = {"pin_memory": offload.pin_memory} | (
        {"nvme_path": offload.nvme_path} if offload.nvme_path else {}
    )
    device_by_section = {
        "offload_optimizer": offload.optimizer,
        "offload_param": offload.parameters,
    }
    return {
        section: {"device": device, **common_settings}
        for section, device in device_by_section.items()
        if device
    }


def _merge_settings_recursively(
    base_settings: Mapping[str, object], top_settings: Mapping[str, object]
) -> dict[str, object]:
    """Return `base_settings` with the values of `top_settings`, section by section."""
    merged = dict(base_settings)
    for key, value in top_settings.items():
        base_value = merged.get(key)
        merged[key] = (
            _merge_settings_recursively(base_value, value)
            if isinstance(base_value, dict) and isinstance(value, dict)
            else value
        )
    return merged
