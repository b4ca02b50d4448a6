"""Convert the division of a model over ranks: FSDP and its mesh to `parallel`, ZeRO to its stages."""

from __future__ import annotations

from ortlaunch.importers.draft import Draft, recipe_value_tree_located_at_node
from ortlaunch.importers.rules import (
    ANY_KEY,
    NO_COUNTERPART,
    ConfigKey,
    EvenIfEmpty,
    Outcome,
    Rule,
    Rules,
    assume,
    by_text,
    drop,
    first_of,
    needless,
    put,
    report_change,
)
from ortlaunch.tables.optimizers import OPTIMIZERS

_EAGER_FOR_STAGE_3 = assume(
    "engine.name", "eager", "ONNX Runtime has no ZeRO 3; zero.stage=2 engine.name=ort runs on it"
)


def zero_stage_rule(zero_stage: int, reason: str) -> Rule:
    """Return the rule of a key that sets ZeRO's stage, with an engine that has stage 3."""
    stage_rule = assume("zero.stage", zero_stage, reason)
    return (stage_rule, _EAGER_FOR_STAGE_3) if zero_stage == 3 else stage_rule


def _unless_mesh_is_set(outcome: Outcome) -> Rule:
    """Return the rule of a key that says less than the sizes of the mesh."""
    return first_of(
        (
            lambda key: key.is_set("parallel.shard") or key.is_set("parallel.replicate"),
            needless("parallel has it"),
        ),
        otherwise=outcome,
    )


ALL_RANKS_SHARE_ONE_COPY = _unless_mesh_is_set(put("parallel.replicate", 1))
_EACH_HOST_HAS_A_COPY = _unless_mesh_is_set(put("parallel.shard", "auto"))


def _mesh_size(axis: str) -> Rule:
    """Return the rule of the size of an axis; 1 stands for none, -1 for all ranks that are left."""
    return first_of(
        (lambda key: key.numeric_value == -1, ALL_RANKS_SHARE_ONE_COPY),
        (lambda key: key.numeric_value in (0, 1), needless("1 stands for none")),
        (
            lambda key: any(map(key.draft.config_value, ("deepspeed", "deepspeed_config"))),
            needless("DeepSpeed's ZeRO divides over all ranks"),
        ),
        otherwise=put(f"parallel.{axis}"),
    )


def replace_division_that_optimizer_lacks(draft: Draft) -> None:
    """Replace an optimizer that updates whole tensors, or leave the model undivided."""
    node = draft.recipe_tree.find_subtree(("optimizer", "name"))
    is_parallel = draft.recipe_tree.find_subtree(("parallel",)) is not None
    if node is None or not (is_parallel or draft.expected_recipe_value_or_none("zero.stage")):
        return
    name, divider = str(node.scalar), "FSDP2" if is_parallel else "ZeRO"
    if name not in OPTIMIZERS or not OPTIMIZERS[name].needs_whole_tensors:
        return
    reason = f"{name.capitalize()} updates whole tensors, so they are not sharded"
    if name == "adamw_8bit":
        draft.recipe_tree = draft.recipe_tree.copy_with_subtree(
            ("optimizer", "name"), recipe_value_tree_located_at_node("adamw", node)
        )
        reason = f"optimizer.name: adamw; {divider} splits the tensors of 8 bits"
        draft.add_remark("changed", "optimizer", node, reason)
    elif is_parallel:
        draft.recipe_tree = draft.recipe_tree.remove_key(("parallel",))
        draft.add_remark("changed", "optimizer", node, f"without parallel; {reason}")
    else:
        draft.put_recipe_value_if_unset("zero.stage", node, "optimizer", 0, reason)


_GATHERED_TWICE = "a layer's weights are freed after its forward pass; zero.stage=2 keeps them"


def _strategy_rule(strategy: object) -> Rule | None:
    """Return the rule of one of FSDP's strategies; None for another word."""
    word = str(strategy).upper()
    if word in ("FULL_SHARD", "TRUE", "1"):
        return ALL_RANKS_SHARE_ONE_COPY
    if word in ("SHARD_GRAD_OP", "FALSE", "2"):
        return (ALL_RANKS_SHARE_ONE_COPY, report_change(_GATHERED_TWICE))
    if word in ("HYBRID_SHARD", "4"):
        return _EACH_HOST_HAS_A_COPY
    if word in ("_HYBRID_SHARD_ZERO2", "HYBRID_SHARD_ZERO2", "5"):
        return (_EACH_HOST_HAS_A_COPY, report_change(_GATHERED_TWICE))
    return None


def _settings(key: ConfigKey) -> dict[str, object]:
    """Return the settings of `fsdp_config` by their names without the prefix of accelerate's."""
    settings = key.sibling("fsdp_config")
    items = settings.items() if isinstance(settings, dict) else ()
    return {str(name).removeprefix("fsdp_"): value for name, value in items}


def _words(key: ConfigKey) -> list[str]:
    # Trainer's is a text of words, or a list of them.
    words = key.sibling("fsdp") or ""
    return [*map(str, words)] if isinstance(words, list) else str(words).replace(",", " ").split()


def _is_undivided(key: ConfigKey) -> bool:
    strategies = (_settings(key).get("sharding_strategy"), *_words(key))
    return any(str(strategy).upper() in ("NO_SHARD", "3") for strategy in strategies)


_UNDIVIDED = needless("NO_SHARD divides nothing: without parallel every rank has the whole model")


def _fsdp_rule(key: ConfigKey) -> Rule:
    """Convert FSDP's strategy in words, such as `full_shard auto_wrap offload`."""
    if _is_undivided(key):
        return _UNDIVIDED
    rules = [rule for rule in map(_strategy_rule, _words(key)) if rule is not None]
    if "offload" in _words(key):
        rules.append(put("parallel.offload", True))
    # Without a strategy there, fsdp_config may have one.
    return rules or needless("parallel has it")


def _fsdp_config_rule(key: ConfigKey) -> Rule:
    return _UNDIVIDED if _is_undivided(key) else (SETTINGS_RULES, ALL_RANKS_SHARE_ONE_COPY)


def _detail_rule(rule: Rule) -> Rule:
    """Return the rule of a setting of FSDP beside `fsdp`."""
    return first_of(
        (_is_undivided, _UNDIVIDED),
        (lambda key: key.sibling("fsdp") or key.sibling("fsdp_config"), rule),
        otherwise=needless("of no effect there: there is no fsdp"),
    )


def _layer_classes(key: ConfigKey) -> Rule:
    names = key.value if isinstance(key.value, list) else key.text.replace(",", " ").split()
    return put("parallel.blocks", names)


_ALWAYS_FSDP2 = needless("parallel is FSDP2")
_ANY_WORLD = needless("checkpoints and exports can be read in every world")
_FROM_RANK_0 = needless("all ranks begin with the weights of rank 0")
_GATHERED_AHEAD = needless("FSDP2 gathers the next layer during the passes of one")
_OWN_PRECISION = needless("precision has it; gradients are averaged in float32")
# By their names without accelerate's prefix.
_SETTING_RULES: Rules = {
    "sharding_strategy": lambda key: _strategy_rule(key.text),
    "reshard_after_forward": EvenIfEmpty(lambda key: _strategy_rule(key.text)),
    **dict.fromkeys(("offload_params", "cpu_offload"), put("parallel.offload", True)),
    "activation_checkpointing": put("model.gradient_checkpointing"),
    "transformer_layer_cls_to_wrap": _layer_classes,
    "auto_wrap_policy": by_text(
        {"TRANSFORMER_BASED_WRAP": needless("layers are gathered one after another")},
        drop("layers are gathered one after another; parallel.blocks names their classes"),
    ),
    "version": _ALWAYS_FSDP2,
    **dict.fromkeys(("state_dict_type", "final_state_dict_type"), _ANY_WORLD),
    **dict.fromkeys(("sync_module_states", "cpu_ram_efficient_loading"), _FROM_RANK_0),
    **dict.fromkeys(("backward_prefetch", "forward_prefetch"), _GATHERED_AHEAD),
    **dict.fromkeys(("limit_all_gathers", "use_orig_params"), _ALWAYS_FSDP2),
    "mixed_precision_policy": _OWN_PRECISION,
}
SETTINGS_RULES: Rules = {
    **{
        f"{prefix}{name}": rule for name, rule in _SETTING_RULES.items() for prefix in ("", "fsdp_")
    },
    ANY_KEY: NO_COUNTERPART,
}
# The keys of FSDP, of Trainer, Axolotl, LLaMA-Factory, accelerate and torchtune: first the mesh.
FSDP_RULES: Rules = {
    **dict.fromkeys(
        ("dp_replicate_size", "mp_replicate_size", "data_parallel_replicate_dim"),
        _mesh_size("replicate"),
    ),
    **dict.fromkeys(
        ("dp_shard_size", "mp_shard_size", "data_parallel_shard_dim"), _mesh_size("shard")
    ),
    **dict.fromkeys(
        (
            *("tensor_parallel_size", "tp_size", "tensor_parallel_dim"),
            "tensor_model_parallel_size",
        ),
        _mesh_size("tensor"),
    ),
    "fsdp": _fsdp_rule,
    "fsdp_config": _fsdp_config_rule,
    "fsdp_version": _detail_rule(_ALWAYS_FSDP2),
    "fsdp_transformer_layer_cls_to_wrap": _detail_rule(_layer_classes),
}
