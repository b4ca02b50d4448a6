"""Convert DeepSpeed's JSON.

Batch, optimizer, schedule and precision become keys of the recipe; all else goes to zero.deepspeed.
A key that is only renamed is a row of a table in recipe/hints/keys_of_other_tools.py.
"""

from __future__ import annotations

import json
from pathlib import Path

from ortlaunch.other_tools import sharding
from ortlaunch.other_tools.draft import Draft, in_one_line, is_empty, number
from ortlaunch.recipe.fields.deepspeed_keys import DEEPSPEED_OWNED, NESTED, TOP
from ortlaunch.recipe.hints.keys_of_other_tools import TRUE_BY_ITSELF
from ortlaunch.recipe.text.place import keys
from ortlaunch.recipe.text.tree import Tree

_OPTIMIZERS = {
    "adam": "adamw",
    "adamw": "adamw",
    "fusedadam": "fused_adam",
    "lamb": "lamb",
    "fusedlamb": "lamb",
    "sgd": "sgd",
}
_SETTINGS = {
    "lr": "learning_rate",
    "eps": "epsilon",
    "betas": "betas",
    "weight_decay": "weight_decay",
    "momentum": "momentum",
}
# Settings that only DeepSpeedCPUAdam has.
_CPU_ADAM = (
    "fp16.fp16_master_weights_and_grads",
    "bf16.bf16_master_weights_and_grads",
    "bf16.bf16_optimizer_states",
)
_AUTO = "Hugging Face's Trainer fills it in from its own arguments, and so does the recipe"
_WARMUPS = ("schedule.warmup_steps", "schedule.warmup_ratio")
_WARMUP_STEPS = 1000  # DeepSpeed's default of warmup_num_steps


def convert(draft: Draft) -> None:
    """Convert a whole config, which has no model and no data."""
    _parts(draft, dict(draft.left), "")
    draft.left = {}


def beside(draft: Draft, node: Tree) -> None:
    """Convert the DeepSpeed config of another tool's config: a path, or a mapping."""
    if node.kind == "mapping":
        return _parts(
            draft, {str(key): child for key, child in node.children.items()}, "deepspeed."
        )
    # Beside the config, and relative to the current folder. An absolute path replaces the folder.
    places = (Path(node.place.source).parent / in_one_line(node), Path(in_one_line(node)))
    path = next((each for each in places if each.is_file()), None)
    if path is None:
        draft.drop(
            "deepspeed", node, "there is no such file here; give zero.stage, and zero.deepspeed"
        )
        # Usual names are such as ds_z3_config.json.
        return sharding.shard(
            draft,
            next((n for n in (3, 2, 1) if str(n) in in_one_line(node)), 0),
            "by that file's name",
        )
    # Imported here: only a config with a path needs it.
    from ortlaunch.other_tools.reading import config

    inner = config(path)
    draft.needless("deepspeed", node, f"{path} is read")
    return _parts(draft, {str(key): child for key, child in inner.children.items()}, "")


def _parts(draft: Draft, parts: dict[str, Tree], prefix: str) -> None:
    sharding.shard(draft, _stage(parts.get("zero_optimization")), "by zero_optimization")
    _batch(draft, parts)  # before the loop, because it removes a redundant size
    # The schedule first: DeepSpeed's warmup_max_lr takes the place of the optimizer's rate.
    for key, node in sorted(parts.items(), key=lambda part: part[0] != "scheduler"):
        if node.scalar == "auto":
            _leave(draft, f"{prefix}{key}", node, DEEPSPEED_OWNED.get(key, ""))
        elif key == "steps_per_print":
            draft.needless(f"{prefix}{key}", node, "it is of DeepSpeed's own lines")
        elif key == "optimizer":
            _optimizer(draft, node)
        elif key == "scheduler":
            _scheduler(draft, node)
        elif key in ("fp16", "bf16", "bfloat16"):
            _precision(draft, key, node)
        elif key in DEEPSPEED_OWNED:
            _ours(draft, f"{prefix}{key}", node, DEEPSPEED_OWNED[key])
        elif key in TOP:
            _raw(draft, key, node, key)
        elif is_empty(node) or _is_off(node):
            draft.account.empty.append(f"{prefix}{key}")
        elif key == "wandb":
            draft.put("log.trackers", node, f"{prefix}{key}", ["wandb"])
        else:
            draft.drop(f"{prefix}{key}", node, "DeepSpeed has no such setting, or has it no more")


def _leave(draft: Draft, key: str, node: Tree, *paths: str) -> None:
    """Leave keys of the recipe, which are alternatives, to the base."""
    draft.needless(key, node, _AUTO)
    draft.kept.append(paths)


def _batch(draft: Draft, parts: dict[str, Tree]) -> None:
    """Convert the three batch sizes; without any, Trainer's or the base's remain."""
    total, micro, passes = (
        number(parts.get(key))
        for key in (
            "train_batch_size",
            "train_micro_batch_size_per_gpu",
            "gradient_accumulation_steps",
        )
    )
    # Two of them decide the third, and a recipe with all three could contradict itself.
    if total and micro and passes:
        draft.needless(
            "gradient_accumulation_steps",
            parts.pop("gradient_accumulation_steps"),
            "the other two decide it",
        )
    elif micro and not total and not passes:
        draft.assume("batch.accumulation_steps", 1, "DeepSpeed's default")


def _stage(node: Tree | None) -> int:
    """Return the stage of `zero_optimization`; 0 without one."""
    # `true` is an older form of stage 1.
    if node is not None and node.scalar is True:
        return 1
    stage = number(node.find(("stage",))) if node is not None else None
    return int(stage) if stage is not None else 0


def _ours(draft: Draft, key: str, node: Tree, path: str) -> None:
    if is_empty(node) or node.scalar == 0 or _is_off(node):
        draft.account.empty.append(key)
    elif path == "log.trackers":  # DeepSpeed's key of this path is tensorboard
        draft.put(path, node, key, ["tensorboard"])
    else:
        draft.put(path, node, key)


def _offload(draft: Draft, key: str, node: Tree, path: str) -> None:
    """Convert a setting of offloading."""
    if node.scalar in (None, False, "none"):
        draft.account.empty.append(key)
    elif node.scalar == "auto":
        draft.needless(key, node, _AUTO)
    else:
        # DeepSpeed's older keys have `true` for the device cpu; pin_memory is a boolean in both.
        older = node.scalar is True and not path.endswith("pin_memory")
        draft.put(path, node, key, "cpu" if older else node.scalar)


def _is_off(node: Tree) -> bool:
    enabled = node.find(("enabled",))
    return enabled is not None and is_empty(enabled)


def _others(draft: Draft, key: str, node: Tree) -> None:
    """Report keys beside `type` and `params` as dropped."""
    for name, child in node.children.items():
        if name not in ("type", "params"):
            draft.drop(f"{key}.{name}", child, "no counterpart")


def _optimizer(draft: Draft, node: Tree) -> None:
    kind = node.find(("type",))
    params = node.find(("params",))
    if kind is not None:
        ours = _OPTIMIZERS.get(str(kind.scalar).lower())
        why = "" if ours else "another optimizer: there is none of that name here"
        draft.put("optimizer.name", kind, "optimizer.type", ours or "adamw", why)
    for key, child in params.children.items() if params is not None else ():
        _setting(draft, str(key), child)
    _others(draft, "optimizer", node)


def _setting(draft: Draft, key: str, node: Tree) -> None:
    name = f"optimizer.params.{key}"
    there = draft.recipe.find(("optimizer", "learning_rate"))
    if node.scalar == "auto":
        draft.needless(name, node, _AUTO)
    elif key == "lr" and there is not None and there.scalar != node.scalar:
        draft.needless(name, node, "of no effect there: scheduler.params.warmup_max_lr is the rate")
    elif key in _SETTINGS:
        draft.put(f"optimizer.{_SETTINGS[key]}", node, name)
    elif key == "adam_w_mode" and node.scalar is False:
        draft.drop(name, node, "weight decay is decoupled, not L2")
    elif key == "adam_w_mode":
        draft.needless(name, node, "weight decay is decoupled")
    elif key in TRUE_BY_ITSELF and node.scalar is False:
        draft.drop(name, node, f"here it is always so: {TRUE_BY_ITSELF[key]}")
    elif is_empty(node) or (key in TRUE_BY_ITSELF and node.scalar is True):
        draft.account.empty.append(name)
    else:
        draft.drop(name, node, "no counterpart")


def _scheduler(draft: Draft, node: Tree) -> None:
    kind = node.find(("type",))
    params = node.find(("params",))
    forms = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
    values: dict[str, Tree] = (
        {str(key): child for key, child in params.children.items()} if params is not None else {}
    )
    if kind is not None:
        curve = values.get("warmup_type")
        bent = forms.get(str(kind.scalar)) and (curve is None or curve.scalar != "linear")
        why = "the warm-up is linear, DeepSpeed's by itself logarithmic" if bent else ""
        why = (
            why
            if str(kind.scalar) in forms
            else "another schedule: there is none of that name here"
        )
        draft.put(
            "schedule.name", kind, "scheduler.type", forms.get(str(kind.scalar), "linear"), why
        )
    # DeepSpeed's setting -> key of the recipe.
    places = {"warmup_num_steps": "schedule.warmup_steps", "warmup_max_lr": "optimizer.learning_rate",
              "total_num_steps": "train.max_steps", "cos_min_ratio": "schedule.minimum_ratio"}  # fmt: skip
    for key, child in values.items():
        _schedule_setting(draft, key, child, places)
    warm = any(draft.recipe.find(keys(path)) for path in _WARMUPS)
    if (
        kind is not None
        and str(kind.scalar) in forms
        and "warmup_num_steps" not in values
        and not warm
    ):
        draft.assume("schedule.warmup_steps", _WARMUP_STEPS, "DeepSpeed's default")
    _others(draft, "scheduler", node)


def _schedule_setting(draft: Draft, key: str, node: Tree, places: dict[str, str]) -> None:
    name = f"scheduler.params.{key}"
    path = places.get(key)
    there = draft.recipe.find(tuple(path.split("."))) if path else None
    if node.scalar == "auto":
        _leave(draft, name, node, *(_WARMUPS if key == "warmup_num_steps" else ()))
    # Configs often repeat the optimizer's lr as warmup_max_lr.
    elif there is not None and there.scalar == node.scalar:
        draft.needless(name, node, f"{path} has it")
    elif path:
        draft.put(path, node, name)
    elif node.scalar in (0, 0.0, "linear", "log"):
        draft.needless(
            name, node, "it begins at 0" if node.scalar == 0 else "the form of the warm-up"
        )
    else:
        draft.drop(name, node, "no counterpart")


def _precision(draft: Draft, key: str, node: Tree) -> None:
    """Convert a section of a precision: whether it is used, and the loss scaling."""
    kind = "fp16" if key == "fp16" else "bf16"
    enabled = node.find(("enabled",))
    auto = enabled is not None and enabled.scalar == "auto"
    if enabled is None or not (
        enabled.scalar is True or (auto and draft.expected("precision") == kind)
    ):
        return draft.needless(key, node, _AUTO if auto else "it is not enabled")
    if auto:
        draft.needless(f"{key}.enabled", enabled, _AUTO)
    else:
        draft.put("precision", enabled, f"{key}.enabled", kind)
    for name, child in node.children.items():
        if name != "enabled":
            _raw(draft, f"{kind}.{name}", child, f"{kind}.{name}")
    return None


def _raw(draft: Draft, key: str, node: Tree, path: str) -> None:
    """Convert settings without a field of the recipe to keys of zero.deepspeed, one by one."""
    if node.kind == "mapping" and path in (*NESTED, "activation_checkpointing", "data_types"):
        for name, child in node.children.items():
            _raw(draft, f"{key}.{name}", child, f"{path}.{name}")
    elif path in _CPU_ADAM and not is_empty(node):
        draft.drop(
            key,
            node,
            (
                "it needs DeepSpeed's own Adam on the CPU; the optimizer here is torch's or "
                "ONNX Runtime's"
            ),
        )
    elif DEEPSPEED_OWNED.get(path, "").startswith("zero.offload."):
        _offload(draft, key, node, DEEPSPEED_OWNED[path])
    elif path == "zero_optimization.stage" or (path == "zero_optimization" and node.scalar is True):
        draft.needless(key, node, "zero.stage has it")
    # "auto" is for Trainer; DeepSpeed itself would reject it.
    elif node.scalar == "auto" or (node.kind == "mapping" and "auto" in json.dumps(node.plain())):
        draft.needless(key, node, _AUTO)
    else:
        draft.put(f"zero.deepspeed.{path}", node, key)
