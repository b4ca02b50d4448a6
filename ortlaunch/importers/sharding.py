"""Convert the sharding of weights over ranks: ZeRO stages, and FSDP, which ZeRO replaces."""

from __future__ import annotations

from ortlaunch.importers.draft import Draft, is_empty, one_line_text
from ortlaunch.recipe.text.tree import Tree

# FSDP's strategies (FSDP 1 by name, FSDP 2 by `reshard_after_forward`) -> ZeRO's stage.
_STAGES = {
    **dict.fromkeys(("FULL_SHARD", "HYBRID_SHARD", "TRUE", "1"), 3),
    **dict.fromkeys(
        ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2", "HYBRID_SHARD_ZERO2", "FALSE", "2"), 2
    ),
    **dict.fromkeys(("NO_SHARD", "3"), 0),
}
_ZERO_REMARK = "DeepSpeed's ZeRO shards instead of FSDP, which needs no list of layers"


def assume_zero_stage_and_eager_for_stage_3(draft: Draft, zero_stage: int, reason: str) -> None:
    """Set ZeRO's stage, and for stage 3 an engine that has it, unless the config sets them."""
    draft.assume_default("zero.stage", zero_stage, reason)
    if zero_stage == 3:
        draft.assume_default(
            "engine.name",
            "eager",
            "ONNX Runtime has no ZeRO 3; zero.stage=2 engine.name=ort runs on it",
        )


def convert_fsdp_keys_to_zero(draft: Draft) -> None:
    """Convert the keys of FSDP, of Trainer, Axolotl and accelerate."""
    strategy_node = draft.take_key("fsdp")
    config_node = draft.take_key("fsdp_config")
    version_node = draft.take_key("fsdp_version")
    layers_node = draft.take_key("fsdp_transformer_layer_cls_to_wrap")
    # Trainer's is a text of words, or a list of them.
    strategy_text = (
        "" if strategy_node is None else one_line_text(strategy_node).replace(",", " ").strip("[]")
    )
    setting_nodes = _fsdp_settings(config_node)
    strategy_setting = setting_nodes.get("sharding_strategy") or setting_nodes.get(
        "reshard_after_forward"
    )
    strategy_words = (
        [strategy_setting.scalar] if strategy_setting is not None else strategy_text.split()
    )
    stages = [_STAGES[str(word).upper()] for word in strategy_words if str(word).upper() in _STAGES]
    if strategy_node is None and config_node is None:
        return
    zero_stage = stages[0] if stages else 3
    assume_zero_stage_and_eager_for_stage_3(draft, zero_stage, "FSDP's strategy")
    for key, node in (
        ("fsdp", strategy_node),
        ("fsdp_config", config_node),
        ("fsdp_version", version_node),
        ("fsdp_transformer_layer_cls_to_wrap", layers_node),
    ):
        add_remark = (
            draft.report_altered if key in ("fsdp", "fsdp_config") else draft.report_needless
        )
        add_remark(key, node, f"zero.stage: {zero_stage}; {_ZERO_REMARK}")
    _convert_fsdp_offload_and_checkpointing(
        draft, setting_nodes, "offload" in strategy_text.split(), zero_stage
    )


def _fsdp_settings(config_node: Tree | None) -> dict[str, Tree]:
    """Return the settings of `fsdp_config` by their names without the prefix of accelerate's."""
    children = {} if config_node is None else config_node.children
    return {str(key).removeprefix("fsdp_"): node for key, node in children.items()}


def _convert_fsdp_offload_and_checkpointing(
    draft: Draft, setting_nodes: dict[str, Tree], has_offload_word: bool, zero_stage: int
) -> None:
    """Convert the settings of FSDP that have keys of their own here."""
    offload_node = setting_nodes.get("offload_params")
    checkpointing_node = setting_nodes.get("activation_checkpointing")
    if has_offload_word or (offload_node is not None and not is_empty(offload_node)):
        draft.assume_default("zero.offload.optimizer", "cpu", "FSDP's offload_params")
        if zero_stage == 3:
            draft.assume_default("zero.offload.parameters", "cpu", "FSDP's offload_params")
    if checkpointing_node is not None and not is_empty(checkpointing_node):
        draft.set_recipe_key_unless_set_and_report(
            "model.gradient_checkpointing",
            checkpointing_node,
            "fsdp_config.activation_checkpointing",
        )
