"""Rules for fields that changed since a checkpoint was written, one for each field.

A test checks that no field lacks a rule. A change that would make the resumed run another training
requires `--allow NAME`. All other changes take effect.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from ortlaunch.optimizers import OPTIMIZERS
from ortlaunch.recipe.text.yaml_text import in_line


class Rule(NamedTuple):
    """The verdict on a change of a field."""

    verdict: str
    """`applied`, or `refused`: it is applied only with `allow`."""
    allow: str = ""
    """Name of `--allow` that lets the change take effect; "" if none does."""
    why: str = ""
    """Further information for the user."""


EFFECT = "applied"
REFUSED = "refused"
_EFFECT = Rule(EFFECT)
_MODEL = Rule(REFUSED, "model")
_DATA = Rule(REFUSED, "data")
_AS_THE_GLOBAL_SIZE = Rule(EFFECT, why="the next step uses the samples that follow")


def _optimizer(before: Any, after: Any) -> Rule:
    # The same state under another name: the checkpoint's can be loaded.
    states = [OPTIMIZERS[name].state for name in (before, after) if name in OPTIMIZERS]
    if len(states) == 2 and states[0] == states[1]:
        return Rule(EFFECT, why="the same values from other code")
    return Rule(REFUSED, "optimizer", "its state is reset unless the checkpoint has it")


RuleOf = Rule | Callable[[Any, Any], Rule]


def _all(rule: Rule, names: str, section: str = "") -> dict[str, RuleOf]:
    return {f"{section}.{name}" if section else name: rule for name in names.split()}


# A mapping of the user's own (model.config) is one field. So is the held-out corpus, because nothing
# is trained on it.
RULES: dict[str, RuleOf] = {
    "name": _EFFECT,
    "seed": Rule(REFUSED, "data", "it determines order, masking and dropout"),
    **_all(_MODEL, "task pretrained config factory arguments freeze", "model"),
    "model.allow_partial": Rule(EFFECT, why="a checkpoint has all weights"),
    "model.attention": Rule(EFFECT, why="the same function with other kernels"),
    **_all(
        Rule(EFFECT, why="the same values with other memory use"),
        "gradient_checkpointing offload_activations",
        "model",
    ),
    **_all(_MODEL, "lora lora.r lora.alpha lora.dropout lora.target_modules", "model"),
    **_all(_MODEL, "target_parameters modules_to_save", "model.lora"),
    "model.lora.merge": Rule(EFFECT, why="it affects only the export"),
    **_all(
        _DATA,
        "train train.format train.path train.name train.subset train.files train.revision train.split",
        "data",
    ),
    **_all(
        _DATA,
        "train.document train.text_column train.label_column train.factory train.arguments",
        "data",
    ),
    **_all(
        _DATA,
        "train.messages_column train.prompt_column train.response_column "
        "train.file_column train.input_column train.system_column train.role_key train.content_key train.roles "
        "train.most_rows train.prompt train.prompt.template train.prompt.without_input "
        "train.train_on train.train_on_end train.train_key",
        "data",
    ),
    "data.train.stream": _DATA,
    "data.train.stream.shuffle": _DATA,
    "data.train.stream.buffer": Rule(EFFECT, why="the same samples"),
    **_all(
        _DATA, "chat_template special_tokens added_tokens attend_across_documents packing", "data"
    ),
    **dict.fromkeys(
        ("data.bucket_lengths", "data.padding"),
        Rule(EFFECT, why="the same samples, with less padding"),
    ),
    **_all(_EFFECT, "evaluation allow_findings", "data"),
    **_all(
        _DATA,
        "tokenizer tokenizer.train tokenizer.vocab_size sequence_length processor transcript_length",
        "data",
    ),
    **_all(
        _DATA,
        "masked_lm masked_lm.probability masked_lm.max_predictions masked_lm.whole_words",
        "data",
    ),
    "data.collate": _DATA,
    "data.workers": Rule(EFFECT, why="random values of the samples may differ"),
    # world.global_samples reports the consequence.
    **_all(_EFFECT, "global_size micro_size accumulation_steps", "batch"),
    "optimizer.name": _optimizer,
    **_all(
        _EFFECT,
        "learning_rate betas epsilon momentum weight_decay no_decay always_adapt layer_decay groups "
        "attributes",
        "optimizer",
    ),
    **_all(
        _EFFECT,
        "name warmup_steps warmup_ratio warmup_power minimum_ratio power decay_ratio decay_type",
        "schedule",
    ),
    # Weights in a checkpoint are float32 in every precision: loading works, but the steps differ.
    "precision": Rule(
        REFUSED, "precision", "the weights are float32 in each, but the steps differ"
    ),
    **_all(_EFFECT, "name allow_fallback memory_optimization memory_optimization_config", "engine"),
    **_all(
        _EFFECT,
        "memory_efficient_grad_management compute_optimizer sparsity_optimizer opset",
        "engine",
    ),
    **_all(
        _EFFECT, "print_input_density custom_autograd allow_traced_values parity_steps", "engine"
    ),
    **_all(
        _EFFECT,
        "parity_tolerance deepcopy_before_export log_level save_onnx print_memory_stats",
        "engine",
    ),
    **_all(
        _EFFECT,
        "cast_propagation cast_propagation_level conv_algorithm_search triton triton_config",
        "engine",
    ),
    **_all(
        _EFFECT,
        "flash_attention efficient_attention tuning tuning_duration_ms tuning_results",
        "engine",
    ),
    **_all(
        _EFFECT,
        "matmul_precision onednn chunked_loss torch_matmul torch_operators torch_modules postprocess",
        "engine",
    ),
    **_all(_EFFECT, "zero zero.stage zero.fused_gradient_norm zero.deepspeed zero.offload"),
    **_all(_EFFECT, "optimizer parameters nvme_path pin_memory", "zero.offload"),
    **_all(Rule(EFFECT, why="the schedule covers the new length"), "max_steps epochs", "train"),
    **_all(
        _EFFECT,
        "max_grad_norm evaluate_every_steps evaluate_every_epochs on_nonfinite max_skips "
        "max_rollbacks stall_seconds",
        "train",
    ),
    **_all(_EFFECT, "on_spike", "train"),
    **_all(_EFFECT, "action deviations limit patience window", "train.on_spike"),
    **_all(_EFFECT, "hook metric stop_after stop_after.evaluations", "train"),
    **_all(
        Rule(EFFECT, why="the best is determined from now on"),
        "stop_after.metric stop_after.mode",
        "train",
    ),
    "train.loss_weight": Rule(REFUSED, "loss", "the loss becomes a different mean"),
    **_all(
        _EFFECT,
        "every_minutes every_steps every_epochs keep keep_every export on_failure async",
        "checkpoint",
    ),
    **_all(_EFFECT, "keep_best keep_best.export", "checkpoint"),
    **_all(
        Rule(EFFECT, why="the best is determined from now on"),
        "keep_best.metric keep_best.mode",
        "checkpoint",
    ),
    **_all(
        _EFFECT,
        "launcher device nodes processes_per_node interface preflight max_restarts env forward",
        "launch",
    ),
    **_all(_EFFECT, "grace_seconds nodes.min nodes.max binding", "launch"),
    **_all(_EFFECT, "every_steps ranks trackers project profile_steps", "log"),
    **_all(
        Rule(EFFECT, why="only `ortlaunch sweep` reads it"),
        "sweep sweep.space sweep.metrics sweep.sampler sweep.pruner sweep.trials sweep.steps "
        "sweep.hours sweep.parallel sweep.submit",
    ),
    **_all(
        _EFFECT,
        "scheduler partition account qos reservation time gpus gpu_type cpus_per_task memory",
        "submit",
    ),
    **_all(
        _EFFECT,
        "constraint nodelist exclude exclusive dependency begin mail_user mail_type requeue",
        "submit",
    ),
    **_all(
        _EFFECT,
        "signal_seconds container container.runtime container.image container.mounts",
        "submit",
    ),
    **_all(_EFFECT, "setup options kubernetes azureml", "submit"),
    **_all(
        _EFFECT,
        "kind image runs volumes workdir namespace queue runtime secret gpu cpu",
        "submit.kubernetes",
    ),
    **_all(
        _EFFECT,
        "memory shared_memory node_selector service_account trainer labels annotations pod job",
        "submit.kubernetes",
    ),
    **_all(
        _EFFECT,
        "compute environment runs data code distribution experiment shared_memory",
        "submit.azureml",
    ),
    **_all(_EFFECT, "workspace resource_group job", "submit.azureml"),
}
# Values that are no fields of the recipe: the resolved world, the data as they were read, code and
# packages.
OTHER_RULES: dict[str, RuleOf] = {
    **_all(_EFFECT, "ranks hosts device micro_samples accumulation_steps", "world"),
    "world.global_samples": _AS_THE_GLOBAL_SIZE,
    "data.samples": Rule(REFUSED, "data", "that many had been read"),
    "data.fingerprint": Rule(REFUSED, "data", "the samples differ"),
    "data.held_out": Rule(
        REFUSED, "data", "other samples are held out, and it trained on some of them"
    ),
    "data.order": Rule(
        REFUSED,
        "data",
        "in the current epoch some samples would repeat and others be skipped",
    ),
    "weights.frozen": Rule(
        REFUSED, "model", "a checkpoint lacks the frozen weights, and they were different"
    ),
    **_all(_EFFECT, "ortlaunch commit dirty python", "code"),
    "packages": _EFFECT,
}
# Fields without effect on an evaluation, which trains no step.
_STEPS = (
    "batch",
    "world",
    "optimizer",
    "schedule",
    "train.max_steps",
    "train.epochs",
    "data.order",
)
# The training data affect an evaluation only through the tokenizer and labels made of them.
_TRAINED_ON = ("data.train", "data.samples", "data.fingerprint")
_OTHER_MODEL = Rule(REFUSED, why="the weights belong to a different model")
_OTHER_WORDS = Rule(
    REFUSED, why="its tokens and labels may come from this data, and the run has no copy"
)
# Names that `--allow` accepts.
NAMES = ("data", "loss", "model", "optimizer", "precision")


class Change(NamedTuple):
    """A value that differs from that of the checkpoint."""

    field: str
    before: Any
    after: Any
    rule: Rule

    @property
    def text(self) -> str:
        """The change without a verdict."""
        return f"{self.field}: {_as_written(self.before)} -> {_as_written(self.after)}"

    def line(self, allowed: tuple[str, ...] = ()) -> str:
        """Return the change as a line for the user."""
        told = f"{self.text}: {self._verdict(allowed)}"
        return f"{told} ({self.rule.why})" if self.rule.why else told

    def _verdict(self, allowed: tuple[str, ...]) -> str:
        if self.rule.verdict != REFUSED:
            return self.rule.verdict
        name = self.rule.allow
        if not name:
            return REFUSED
        return (
            f"{EFFECT}, with --allow {name}"
            if name in allowed
            else f"{REFUSED} without --allow {name}"
        )

    def is_refused(self, allowed: tuple[str, ...]) -> bool:
        """Return whether the change is refused and not allowed by name."""
        return self.rule.verdict == REFUSED and self.rule.allow not in allowed


def _as_written(value: Any) -> str:
    """Return a value as a recipe writes it; keys without a value are left out.

    A list of one text is shown as that text, because both forms mean the same.
    """
    if isinstance(value, Mapping):
        value = {key: each for key, each in value.items() if each not in (None, {}, [])}
    single = isinstance(value, (list, tuple)) and len(value) == 1 and isinstance(value[0], str)
    text = value[0] if single else value
    return (
        repr(text)
        if isinstance(text, (str, int, float)) and not isinstance(text, bool)
        else in_line(text)
    )


def changes(
    before: Mapping[str, Any], after: Mapping[str, Any], rules: Mapping[str, RuleOf]
) -> list[Change]:
    """Return every leaf that differs, in the order of `before`, each with its rule."""
    return [
        Change(field, old, new, rule_of(field, rules, old, new))
        for field, old, new in leaves(before, after)
        if not _are_same_files(old, new)
    ]


def _are_same_files(before: Any, after: Any) -> bool:
    """Return whether both values are absolute paths of the same files, one perhaps through a link."""
    if isinstance(before, (list, tuple)) and isinstance(after, (list, tuple)):
        return len(before) == len(after) > 0 and all(map(_are_same_files, before, after))
    return (
        isinstance(before, str)
        and isinstance(after, str)
        and os.path.isabs(before)
        and os.path.realpath(before) == os.path.realpath(after)
    )


def of_evaluation(found: list[Change], keeps_vocabulary: bool) -> list[Change]:
    """Return the changes that concern an evaluation.

    Changes of the model are refused, all others take effect.

    Args: found: all changes since the checkpoint was written. keeps_vocabulary: whether the run
    keeps its tokenizer and labels. All runs do, but a checkpoint that was copied without its run
    folder does not have them.
    """
    hidden = (*_STEPS, *_TRAINED_ON) if keeps_vocabulary else _STEPS
    return [
        change._replace(rule=_rule_here(change))
        for change in found
        if not _is_below(change.field, hidden)
    ]


def _rule_here(change: Change) -> Rule:
    if _is_below(change.field, _TRAINED_ON):
        return _OTHER_WORDS
    refused = change.rule.verdict == REFUSED
    return (
        _OTHER_MODEL if change.rule.allow == "model" else Rule(EFFECT) if refused else change.rule
    )


def _is_below(field: str, names: tuple[str, ...]) -> bool:
    return any(field == name or field.startswith(f"{name}.") for name in names)


def rule_of(field: str, rules: Mapping[str, RuleOf], before: Any, after: Any) -> Rule:
    """Return the field's rule, or that of the nearest mapping above it that has one."""
    while field and field not in rules:
        field = field.rpartition(".")[0]
    # Fields that other versions of ortlaunch wrote.
    rule = rules.get(field, Rule(EFFECT, why="unknown to this version"))
    return rule if isinstance(rule, Rule) else rule(before, after)


def leaves(before: Any, after: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield (dotted path, before, after) of every leaf that differs."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        # Keys of both, in order, each once.
        for key in dict.fromkeys((*before, *after)):
            yield from leaves(before.get(key), after.get(key), f"{path}.{key}" if path else key)
    elif before != after:
        yield path, before, after
