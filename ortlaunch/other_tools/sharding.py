"""Convert the sharding of weights over ranks: ZeRO stages, and FSDP, which ZeRO replaces."""

from __future__ import annotations

from ortlaunch.other_tools.draft import Draft, in_one_line, is_empty
from ortlaunch.recipe.text.tree import Tree

# FSDP's strategies (FSDP 1 by name, FSDP 2 by `reshard_after_forward`) -> ZeRO's stage.
_STAGES = {
    **dict.fromkeys(("FULL_SHARD", "HYBRID_SHARD", "TRUE", "1"), 3),
    **dict.fromkeys(
        ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2", "HYBRID_SHARD_ZERO2", "FALSE", "2"), 2
    ),
    **dict.fromkeys(("NO_SHARD", "3"), 0),
}
_INSTEAD = "DeepSpeed's ZeRO shards instead of FSDP, which needs no list of layers"


def shard(draft: Draft, stage: int, why: str) -> None:
    """Set ZeRO's stage, and for stage 3 an engine that has it, unless the config sets them."""
    draft.assume("zero.stage", stage, why)
    if stage == 3:
        draft.assume(
            "engine.name",
            "eager",
            "ONNX Runtime has no ZeRO 3; zero.stage=2 engine.name=ort runs on it",
        )


def fsdp(draft: Draft) -> None:
    """Convert the keys of FSDP, of Trainer, Axolotl and accelerate."""
    words = draft.pop("fsdp")
    config = draft.pop("fsdp_config")
    version = draft.pop("fsdp_version")
    layers = draft.pop("fsdp_transformer_layer_cls_to_wrap")
    # Trainer's is a text of words, or a list of them.
    given = "" if words is None else in_one_line(words).replace(",", " ").strip("[]")
    settings = _settings(config)
    strategy = settings.get("sharding_strategy") or settings.get("reshard_after_forward")
    named = [strategy.scalar] if strategy is not None else given.split()
    stages = [_STAGES[str(each).upper()] for each in named if str(each).upper() in _STAGES]
    if words is None and config is None:
        return
    stage = stages[0] if stages else 3
    shard(draft, stage, "FSDP's strategy")
    for key, node in (
        ("fsdp", words),
        ("fsdp_config", config),
        ("fsdp_version", version),
        ("fsdp_transformer_layer_cls_to_wrap", layers),
    ):
        report = draft.alter if key in ("fsdp", "fsdp_config") else draft.needless
        report(key, node, f"zero.stage: {stage}; {_INSTEAD}")
    _beside(draft, settings, "offload" in given.split(), stage)


def _settings(config: Tree | None) -> dict[str, Tree]:
    """Return the settings of `fsdp_config` by their names without the prefix of accelerate's."""
    children = {} if config is None else config.children
    return {str(key).removeprefix("fsdp_"): node for key, node in children.items()}


def _beside(draft: Draft, settings: dict[str, Tree], offloads: bool, stage: int) -> None:
    """Convert the settings of FSDP that have keys of their own here."""
    moved = settings.get("offload_params")
    again = settings.get("activation_checkpointing")
    if offloads or (moved is not None and not is_empty(moved)):
        draft.assume("zero.offload.optimizer", "cpu", "FSDP's offload_params")
        if stage == 3:
            draft.assume("zero.offload.parameters", "cpu", "FSDP's offload_params")
    if again is not None and not is_empty(again):
        draft.put("model.gradient_checkpointing", again, "fsdp_config.activation_checkpointing")
