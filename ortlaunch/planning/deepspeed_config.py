"""The only module that writes DeepSpeed's JSON names. Pure.

All values come from the recipe and the plan's batch, so that there is one source; the recipe's raw
`zero.deepspeed` is merged last.
"""

from __future__ import annotations

from ortlaunch.json_types import Json
from ortlaunch.recipe import Recipe
from ortlaunch.recipe.fields.zero import Offload

# Steps between two prints of DeepSpeed: more than any run has.
NEVER = 10**9


def deepspeed_config(
    recipe: Recipe, micro_samples: int, accumulation_steps: int, ranks: int
) -> dict[str, object] | None:
    """Return the DeepSpeed config of a recipe, or None where it trains without DeepSpeed."""
    if recipe.zero is None:
        return None
    config: Json = {
        "train_batch_size": micro_samples * accumulation_steps * ranks,
        "train_micro_batch_size_per_gpu": micro_samples,
        "gradient_accumulation_steps": accumulation_steps,
        "zero_optimization": {"stage": recipe.zero.stage, **_offload(recipe.zero.offload)},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": NEVER,
        # Always written: without the field, DeepSpeed clips to 1.0.
        "gradient_clipping": recipe.train.max_grad_norm or 0.0,
    }
    if recipe.format.is_narrow:
        config[recipe.precision] = {"enabled": True}
    return _merged(config, recipe.zero.deepspeed)


def _offload(offload: Offload | None) -> dict[str, object]:
    """Return DeepSpeed's sections for tensors that are kept off the GPU."""
    if offload is None:
        return {}
    common = {"pin_memory": offload.pin_memory} | (
        {"nvme_path": offload.nvme_path} if offload.nvme_path else {}
    )
    devices = {"offload_optimizer": offload.optimizer, "offload_param": offload.parameters}
    return {section: {"device": device, **common} for section, device in devices.items() if device}


def _merged(base: Json, top: Json) -> Json:
    """Return `base` with the values of `top`, section by section."""
    merged = dict(base)
    for key, value in top.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merged(merged[key], value) if both else value
    return merged
