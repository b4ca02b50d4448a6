"""Convert the sharding of weights over ranks: ZeRO stages, and FSDP, which ZeRO replaces."""

from __future__ import annotations

from ortlaunch.importers.rules import ConfigKey, Rule, Rules, assume, needless, put, report_change

# FSDP's strategies (FSDP 1 by name, FSDP 2 by `reshard_after_forward`) -> ZeRO's stage.
_STAGES = {
    **dict.fromkeys(("FULL_SHARD", "HYBRID_SHARD", "TRUE", "1"), 3),
    **dict.fromkeys(
        ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2", "HYBRID_SHARD_ZERO2", "FALSE", "2"), 2
    ),
    **dict.fromkeys(("NO_SHARD", "3"), 0),
}
_EAGER_FOR_STAGE_3 = assume(
    "engine.name", "eager", "ONNX Runtime has no ZeRO 3; zero.stage=2 engine.name=ort runs on it"
)


def zero_stage_rule(zero_stage: int, reason: str) -> Rule:
    """Return the rule of a key that sets ZeRO's stage, with an engine that has stage 3."""
    stage_rule = assume("zero.stage", zero_stage, reason)
    return (stage_rule, _EAGER_FOR_STAGE_3) if zero_stage == 3 else stage_rule


def _fsdp_settings(key: ConfigKey) -> dict[str, object]:
    """Return the settings of `fsdp_config` by their names without the prefix of accelerate's."""
    settings = key.sibling("fsdp_config")
    items = settings.items() if isinstance(settings, dict) else ()
    return {str(name).removeprefix("fsdp_"): value for name, value in items}


def _fsdp_words(key: ConfigKey) -> list[str]:
    # Trainer's is a text of words, or a list of them.
    strategy = key.sibling("fsdp") or ""
    words = strategy if isinstance(strategy, list) else str(strategy).replace(",", " ").split()
    return [str(word) for word in words]


def _zero_stage_of_fsdp(key: ConfigKey) -> int:
    settings = _fsdp_settings(key)
    strategy = settings.get("sharding_strategy", settings.get("reshard_after_forward"))
    words = _fsdp_words(key) if strategy is None else [str(strategy)]
    return next((_STAGES[word.upper()] for word in words if word.upper() in _STAGES), 3)


def _fsdp_rule(key: ConfigKey) -> Rule:
    zero_stage = _zero_stage_of_fsdp(key)
    rules = [
        zero_stage_rule(zero_stage, "FSDP's strategy"),
        report_change(_zero_stage_remark(zero_stage)),
    ]
    if "offload" in _fsdp_words(key) or _fsdp_settings(key).get("offload_params"):
        tensors = ("optimizer", "parameters") if zero_stage == 3 else ("optimizer",)
        rules += [
            assume(f"zero.offload.{name}", "cpu", "FSDP's offload_params") for name in tensors
        ]
    for name in ("activation_checkpointing", "fsdp_activation_checkpointing"):
        key.convert_child(name, put("model.gradient_checkpointing"))
    return rules


def _fsdp_detail(key: ConfigKey) -> Rule:
    has_fsdp = key.sibling("fsdp") or key.sibling("fsdp_config")
    return needless(
        _zero_stage_remark(_zero_stage_of_fsdp(key))
        if has_fsdp
        else "of no effect there: there is no fsdp"
    )


def _zero_stage_remark(zero_stage: int) -> str:
    reason = "DeepSpeed's ZeRO shards instead of FSDP, which needs no list of layers"
    return f"zero.stage: {zero_stage}; {reason}"


# The keys of FSDP, of Trainer, Axolotl and accelerate.
FSDP_RULES: Rules = {
    "fsdp": _fsdp_rule,
    "fsdp_config": _fsdp_rule,
    "fsdp_version": _fsdp_detail,
    "fsdp_transformer_layer_cls_to_wrap": _fsdp_detail,
}
