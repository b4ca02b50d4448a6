"""Rules for fields that changed since a checkpoint was written, one for each field.

A test checks that no field lacks a rule. A change that would make the resumed run another training
requires `--allow NAME`. All other changes take effect.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from ortlaunch.recipe.text.yaml_text import one_line_yaml_text
from ortlaunch.tables.optimizers import OPTIMIZERS


class ChangeRule(NamedTuple):
    """The verdict on a change of a field."""

    verdict: str
    """`applied`, or `refused`: it is applied only with `allow`."""
    allow_name: str = ""
    """Name of `--allow` that lets the change take effect; "" if none does."""
    explanation: str = ""
    """Further information for the user."""


EFFECT = "applied"
REFUSED = "refused"
_EFFECT = ChangeRule(EFFECT)
_MODEL = ChangeRule(REFUSED, "model")
_DATA = ChangeRule(REFUSED, "data")
_AS_THE_GLOBAL_SIZE = ChangeRule(EFFECT, explanation="the next step uses the samples that follow")


def _optimizer_rule(old_name: Any, new_name: Any) -> ChangeRule:
    # The same state under another name: the checkpoint's can be loaded.
    states = [OPTIMIZERS[name].state for name in (old_name, new_name) if name in OPTIMIZERS]
    if len(states) == 2 and states[0] == states[1]:
        return ChangeRule(EFFECT, explanation="the same values from other code")
    return ChangeRule(REFUSED, "optimizer", "its state is reset unless the checkpoint has it")


RuleOrFunction = ChangeRule | Callable[[Any, Any], ChangeRule]


def _same_rule_for_fields(
    rule: ChangeRule, field_names: str, section: str = ""
) -> dict[str, RuleOrFunction]:
    return {f"{section}.{name}" if section else name: rule for name in field_names.split()}


# A mapping of the user's own (model.config) is one field. So is the held-out corpus, because nothing
# is trained on it.
RULES: dict[str, RuleOrFunction] = {
    "name": _EFFECT,
    "seed": ChangeRule(REFUSED, "data", "it determines order, masking and dropout"),
    **_same_rule_for_fields(_MODEL, "task pretrained config factory arguments freeze", "model"),
    "model.allow_partial": ChangeRule(EFFECT, explanation="a checkpoint has all weights"),
    "model.attention": ChangeRule(EFFECT, explanation="the same function with other kernels"),
    **_same_rule_for_fields(
        ChangeRule(EFFECT, explanation="the same values with other memory use"),
        "gradient_checkpointing offload_activations",
        "model",
    ),
    **_same_rule_for_fields(
        _MODEL, "lora lora.r lora.alpha lora.dropout lora.target_modules", "model"
    ),
    **_same_rule_for_fields(_MODEL, "target_parameters modules_to_save", "model.lora"),
    "model.lora.merge": ChangeRule(EFFECT, explanation="it affects only the export"),
    **_same_rule_for_fields(
        _DATA,
        "train train.format train.path train.name train.subset train.files train.revision train.split",
        "data",
    ),
    **_same_rule_for_fields(
        _DATA,
        "train.document train.text_column train.label_column train.factory train.arguments",
        "data",
    ),
    **_same_rule_for_fields(
        _DATA,
        "train.messages_column train.prompt_column train.response_column "
        "train.file_column train.input_column train.system_column train.role_key train.content_key train.roles "
        "train.most_rows train.prompt train.prompt.template train.prompt.without_input "
        "train.train_on train.train_on_end train.train_key",
        "data",
    ),
    "data.train.stream": _DATA,
    "data.train.stream.shuffle": _DATA,
    "data.train.stream.buffer": ChangeRule(EFFECT, explanation="the same samples"),
    **_same_rule_for_fields(
        _DATA, "chat_template special_tokens added_tokens attend_across_documents packing", "data"
    ),
    **dict.fromkeys(
        ("data.bucket_lengths", "data.padding"),
        ChangeRule(EFFECT, explanation="the same samples, with less padding"),
    ),
    **_same_rule_for_fields(_EFFECT, "evaluation allow_findings", "data"),
    **_same_rule_for_fields(
        _DATA,
        "tokenizer tokenizer.train tokenizer.vocab_size sequence_length processor transcript_length",
        "data",
    ),
    **_same_rule_for_fields(
        _DATA,
        "masked_lm masked_lm.probability masked_lm.max_predictions masked_lm.whole_words",
        "data",
    ),
    "data.collate": _DATA,
    "data.workers": ChangeRule(EFFECT, explanation="random values of the samples may differ"),
    # world.global_samples reports the consequence.
    **_same_rule_for_fields(_EFFECT, "global_size micro_size accumulation_steps", "batch"),
    "optimizer.name": _optimizer_rule,
    **_same_rule_for_fields(
        _EFFECT,
        "learning_rate betas epsilon momentum weight_decay no_decay always_adapt layer_decay groups "
        "attributes",
        "optimizer",
    ),
    **_same_rule_for_fields(
        _EFFECT,
        "name warmup_steps warmup_ratio warmup_power minimum_ratio power decay_ratio decay_type",
        "schedule",
    ),
    # Weights in a checkpoint are float32 in every precision: loading works, but the steps differ.
    "precision": ChangeRule(
        REFUSED, "precision", "the weights are float32 in each, but the steps differ"
    ),
    **_same_rule_for_fields(
        _EFFECT, "name allow_fallback memory_optimization memory_optimization_config", "engine"
    ),
    **_same_rule_for_fields(
        _EFFECT,
        "memory_efficient_grad_management compute_optimizer sparsity_optimizer opset",
        "engine",
    ),
    **_same_rule_for_fields(
        _EFFECT, "print_input_density custom_autograd allow_traced_values parity_steps", "engine"
    ),
    **_same_rule_for_fields(
        _EFFECT,
        "parity_tolerance deepcopy_before_export log_level save_onnx ort_variables",
        "engine",
    ),
    **_same_rule_for_fields(
        _EFFECT,
        "matmul_precision onednn chunked_loss torch_matmul torch_operators torch_modules postprocess",
        "engine",
    ),
    **_same_rule_for_fields(
        _EFFECT, "zero zero.stage zero.fused_gradient_norm zero.deepspeed zero.offload"
    ),
    **_same_rule_for_fields(_EFFECT, "optimizer parameters nvme_path pin_memory", "zero.offload"),
    **_same_rule_for_fields(
        ChangeRule(EFFECT, explanation="the schedule covers the new length"),
        "max_steps epochs",
        "train",
    ),
    **_same_rule_for_fields(
        _EFFECT,
        "max_grad_norm evaluate_every_steps evaluate_every_epochs on_nonfinite max_skips "
        "max_rollbacks stall_seconds",
        "train",
    ),
    **_same_rule_for_fields(_EFFECT, "on_spike", "train"),
    **_same_rule_for_fields(_EFFECT, "action deviations limit patience window", "train.on_spike"),
    **_same_rule_for_fields(_EFFECT, "hook metric stop_after stop_after.evaluations", "train"),
    **_same_rule_for_fields(
        ChangeRule(EFFECT, explanation="the best is determined from now on"),
        "stop_after.metric stop_after.mode",
        "train",
    ),
    "train.loss_weight": ChangeRule(REFUSED, "loss", "the loss becomes a different mean"),
    **_same_rule_for_fields(
        _EFFECT,
        "every_minutes every_steps every_epochs keep keep_every export on_failure async",
        "checkpoint",
    ),
    **_same_rule_for_fields(_EFFECT, "keep_best keep_best.export", "checkpoint"),
    **_same_rule_for_fields(
        ChangeRule(EFFECT, explanation="the best is determined from now on"),
        "keep_best.metric keep_best.mode",
        "checkpoint",
    ),
    **_same_rule_for_fields(
        _EFFECT,
        "launcher device nodes processes_per_node interface preflight max_restarts env forward",
        "launch",
    ),
    **_same_rule_for_fields(_EFFECT, "grace_seconds nodes.min nodes.max binding", "launch"),
    **_same_rule_for_fields(_EFFECT, "every_steps ranks trackers project profile_steps", "log"),
    **_same_rule_for_fields(
        ChangeRule(EFFECT, explanation="only `ortlaunch sweep` reads it"),
        "sweep sweep.space sweep.metrics sweep.sampler sweep.pruner sweep.trials sweep.steps "
        "sweep.hours sweep.parallel sweep.submit",
    ),
    **_same_rule_for_fields(
        _EFFECT,
        "scheduler partition account qos reservation time gpus gpu_type cpus_per_task memory",
        "submit",
    ),
    **_same_rule_for_fields(
        _EFFECT,
        "constraint nodelist exclude exclusive dependency begin mail_user mail_type requeue",
        "submit",
    ),
    **_same_rule_for_fields(
        _EFFECT,
        "signal_seconds container container.runtime container.image container.mounts",
        "submit",
    ),
    **_same_rule_for_fields(_EFFECT, "setup options kubernetes azureml", "submit"),
    **_same_rule_for_fields(
        _EFFECT,
        "kind image runs volumes workdir namespace queue runtime secret gpu cpu",
        "submit.kubernetes",
    ),
    **_same_rule_for_fields(
        _EFFECT,
        "memory shared_memory node_selector service_account trainer labels annotations pod job",
        "submit.kubernetes",
    ),
    **_same_rule_for_fields(
        _EFFECT,
        "compute environment runs data code distribution experiment shared_memory",
        "submit.azureml",
    ),
    **_same_rule_for_fields(_EFFECT, "workspace resource_group job", "submit.azureml"),
}
# Values that are no fields of the recipe: the resolved world, the data as they were read, code and
# packages.
OTHER_RULES: dict[str, RuleOrFunction] = {
    **_same_rule_for_fields(
        _EFFECT, "ranks hosts device micro_samples accumulation_steps", "world"
    ),
    "world.global_samples": _AS_THE_GLOBAL_SIZE,
    "data.samples": ChangeRule(REFUSED, "data", "that many had been read"),
    "data.fingerprint": ChangeRule(REFUSED, "data", "the samples differ"),
    "data.held_out": ChangeRule(
        REFUSED, "data", "other samples are held out, and it trained on some of them"
    ),
    "data.order": ChangeRule(
        REFUSED,
        "data",
        "in the current epoch some samples would repeat and others be skipped",
    ),
    "weights.frozen": ChangeRule(
        REFUSED, "model", "a checkpoint lacks the frozen weights, and they were different"
    ),
    **_same_rule_for_fields(_EFFECT, "ortlaunch commit dirty python", "code"),
    "packages": _EFFECT,
}
# Fields without effect on an evaluation, which trains no step.
_TRAINING_FIELDS = (
    "batch",
    "world",
    "optimizer",
    "schedule",
    "train.max_steps",
    "train.epochs",
    "data.order",
)
# The training data affect an evaluation only through the tokenizer and labels made of them.
_DATA_FIELDS = ("data.train", "data.samples", "data.fingerprint")
_OTHER_MODEL = ChangeRule(REFUSED, explanation="the weights belong to a different model")
_OTHER_DATA = ChangeRule(
    REFUSED, explanation="its tokens and labels may come from this data, and the run has no copy"
)
# Names that `--allow` accepts.
ALLOW_NAMES = ("data", "loss", "model", "optimizer", "precision")


class Change(NamedTuple):
    """A value that differs from that of the checkpoint."""

    field: str
    old_value: Any
    new_value: Any
    rule: ChangeRule

    @property
    def change_text(self) -> str:
        """The change without a verdict."""
        return (
            f"{self.field}: {_value_text_without_empty_keys(self.old_value)} -> "
            f"{_value_text_without_empty_keys(self.new_value)}"
        )

    def summary_line(self, allowed_names: tuple[str, ...] = ()) -> str:
        """Return the change as a line for the user."""
        message = f"{self.change_text}: {self._verdict_with_allow_option(allowed_names)}"
        return f"{message} ({self.rule.explanation})" if self.rule.explanation else message

    def _verdict_with_allow_option(self, allowed_names: tuple[str, ...]) -> str:
        if self.rule.verdict != REFUSED:
            return self.rule.verdict
        allow_name = self.rule.allow_name
        if not allow_name:
            return REFUSED
        return (
            f"{EFFECT}, with --allow {allow_name}"
            if allow_name in allowed_names
            else f"{REFUSED} without --allow {allow_name}"
        )

    def is_refused(self, allowed_names: tuple[str, ...]) -> bool:
        """Return whether the change is refused and not allowed by name."""
        return self.rule.verdict == REFUSED and self.rule.allow_name not in allowed_names


def _value_text_without_empty_keys(value: Any) -> str:
    """Return a value as a recipe writes it; keys without a value are left out.

    A list of one text is shown as that text, because both forms mean the same.
    """
    if isinstance(value, Mapping):
        value = {key: item for key, item in value.items() if item not in (None, {}, [])}
    is_single_text = (
        isinstance(value, (list, tuple)) and len(value) == 1 and isinstance(value[0], str)
    )
    text = value[0] if is_single_text else value
    return (
        repr(text)
        if isinstance(text, (str, int, float)) and not isinstance(text, bool)
        else one_line_yaml_text(text)
    )


def changed_leaves_with_rules(
    old_values: Mapping[str, Any],
    new_values: Mapping[str, Any],
    rules: Mapping[str, RuleOrFunction],
) -> list[Change]:
    """Return every leaf that differs, in the order of `old_values`, each with its rule."""
    return [
        Change(
            field,
            old_value,
            new_value,
            rule_of_field_or_nearest_parent(field, rules, old_value, new_value),
        )
        for field, old_value, new_value in changed_leaf_paths_and_values(old_values, new_values)
        if not _are_absolute_paths_of_same_files(old_value, new_value)
    ]


def _are_absolute_paths_of_same_files(old_value: Any, new_value: Any) -> bool:
    """Return whether both values are absolute paths of the same files, one perhaps through a link."""
    if isinstance(old_value, (list, tuple)) and isinstance(new_value, (list, tuple)):
        return len(old_value) == len(new_value) > 0 and all(
            map(_are_absolute_paths_of_same_files, old_value, new_value)
        )
    return (
        isinstance(old_value, str)
        and isinstance(new_value, str)
        and os.path.isabs(old_value)
        and os.path.realpath(old_value) == os.path.realpath(new_value)
    )


def changes_concerning_evaluation_with_own_rules(
    all_changes: list[Change], keeps_vocabulary: bool
) -> list[Change]:
    """Return the changes that concern an evaluation.

    Changes of the model are refused, all others take effect.

    Args: found: all changes since the checkpoint was written. keeps_vocabulary: whether the run
    keeps its tokenizer and labels. All runs do, but a checkpoint that was copied without its run
    folder does not have them.
    """
    ignored_fields = (*_TRAINING_FIELDS, *_DATA_FIELDS) if keeps_vocabulary else _TRAINING_FIELDS
    return [
        change._replace(rule=_change_rule_for_evaluation(change))
        for change in all_changes
        if not _is_at_or_below(change.field, ignored_fields)
    ]


def _change_rule_for_evaluation(change: Change) -> ChangeRule:
    if _is_at_or_below(change.field, _DATA_FIELDS):
        return _OTHER_DATA
    is_refused = change.rule.verdict == REFUSED
    return (
        _OTHER_MODEL
        if change.rule.allow_name == "model"
        else ChangeRule(EFFECT)
        if is_refused
        else change.rule
    )


def _is_at_or_below(field_path: str, ancestor_paths: tuple[str, ...]) -> bool:
    return any(
        field_path == ancestor_path or field_path.startswith(f"{ancestor_path}.")
        for ancestor_path in ancestor_paths
    )


def rule_of_field_or_nearest_parent(
    field_path: str, rules: Mapping[str, RuleOrFunction], old_value: Any, new_value: Any
) -> ChangeRule:
    """Return the field's rule, or that of the nearest mapping above it that has one."""
    while field_path and field_path not in rules:
        field_path = field_path.rpartition(".")[0]
    # Fields that other versions of ortlaunch wrote.
    rule = rules.get(field_path, ChangeRule(EFFECT, explanation="unknown to this version"))
    return rule if isinstance(rule, ChangeRule) else rule(old_value, new_value)


def changed_leaf_paths_and_values(
    old_value: Any, new_value: Any, dotted_path: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    """Yield (dotted path, before, after) of every leaf that differs."""
    if isinstance(old_value, Mapping) and isinstance(new_value, Mapping):
        # Keys of both, in order, each once.
        for key in dict.fromkeys((*old_value, *new_value)):
            yield from changed_leaf_paths_and_values(
                old_value.get(key),
                new_value.get(key),
                f"{dotted_path}.{key}" if dotted_path else key,
            )
    elif old_value != new_value:
        yield dotted_path, old_value, new_value
