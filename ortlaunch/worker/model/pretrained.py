"""Weights from a folder or the hub, and our report of them instead of transformers'.

A head that is new for the task, or has another number of labels, starts at random. The head of
another task is left out. Any other weight that is missing, left over or of another shape is
refused. If model.config.vocab_size changes the vocabulary, the embeddings are resized.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ortlaunch.base.errors import InputError
from ortlaunch.base.json_types import Json
from ortlaunch.base.units import first_names_and_count_of_rest
from ortlaunch.recipe import Recipe
from ortlaunch.tables.families import FAMILIES
from ortlaunch.worker.patching import replace_attribute_temporarily

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

# `missing`: weights that the source lacks. `unexpected`: weights that only the source has.
# `resized`: a change of the vocabulary. `relabelled`: weights of a head for other labels.
LoadedNames = Mapping[str, list[str]]
NOTHING_BUT_LOADED: LoadedNames = {
    name: [] for name in ("missing", "unexpected", "resized", "relabelled")
}
# Starts of transformers' reports: of version 5, of earlier ones, and of resized embeddings.
_REPORTS = (
    "LOAD REPORT",
    "Some weights of",
    "The new ",
)
# Files of earlier releases have these; today they are computed.
_OLD_BUFFERS = (
    "position_ids",
    "inv_freq",
    "masked_bias",
)
# The most names in one message.
_MAX_NAMED = 6


def load_pretrained_resizing_vocabulary_and_list_names(
    auto_class: Any,
    folder_or_hub_name: str,
    config: PreTrainedConfig,
    *,
    allows_other_head: bool,
    allows_partial: bool,
    **options: Any,
) -> tuple[nn.Module, LoadedNames]:
    """Load the model of an auto class with the weights of `folder_or_hub_name`.

    Args:
        auto_class: the auto class of transformers.
        folder_or_hub_name: a folder, or a name on the hub.
        config: the model's config. If its vocabulary differs from that of `folder_or_hub_name`, the embeddings
            are resized to it.
        allows_other_head: whether the task's head may be missing, or have another number of labels.
        allows_partial: whether any weights may be missing or left over.
        options: further arguments of `from_pretrained`.

    Raises:
        InputError: weights have another shape than the model's, are missing or left over, or cannot
            be read.
    """
    source_config = _load_source_config(folder_or_hub_name)
    source_vocabulary = _vocabulary_size(source_config)
    requested_vocabulary = _vocabulary_size(config)
    # Load at the size of the source first; `_resize` then keeps the trained embeddings. Until then
    # a new token, such as padding, does not exist.
    new_tokens = {
        name: value
        for name, value in config.to_dict().items()
        if name.endswith("_token_id")
        and isinstance(value, int)
        and value >= (source_vocabulary or 0) > 0
    }
    for name in new_tokens:
        setattr(config, name, getattr(source_config, name, None))
    if source_vocabulary != requested_vocabulary:
        config.get_text_config().vocab_size = source_vocabulary
    model, info = _load_model_and_transformers_loading_info(
        auto_class, folder_or_hub_name, config=config, **options
    )
    relabelled = [
        mismatch
        for mismatch in info["mismatched_keys"]
        if allows_other_head and _is_head_with_other_label_count(mismatch, model)
    ]
    mismatch_texts = sorted(
        _mismatch_text(mismatch)
        for mismatch in info["mismatched_keys"]
        if mismatch not in relabelled
    )
    if mismatch_texts:
        raise InputError(
            "model.pretrained: weights differ in shape from model.config: "
            f"{first_names_and_count_of_rest(mismatch_texts, _MAX_NAMED, '; ')}"
        )
    loaded = {name: sorted(info[f"{name}_keys"]) for name in ("missing", "unexpected")}
    if not allows_partial:
        _refuse_missing_or_unused_weights(model, loaded, allows_other_head)
    resized = _resize_embeddings_and_describe(model, source_vocabulary, requested_vocabulary)
    model.config.update(new_tokens)
    return model, {
        **loaded,
        "resized": resized,
        "relabelled": sorted(map(_mismatch_text, relabelled)),
    }


def _load_model_and_transformers_loading_info(
    auto_class: Any, folder_or_hub_name: str, **options: Any
) -> tuple[PreTrainedModel, Json]:
    from safetensors import SafetensorError

    try:
        with _suppress_loading_reports_and_keep_bar_off():
            model, info = auto_class.from_pretrained(
                folder_or_hub_name,
                **options,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
    # transformers raises OSError or ValueError for other faults; the caller reports those.
    except SafetensorError as error:
        raise InputError(
            f"model.pretrained: {folder_or_hub_name} has weights that cannot be read: {error}"
        ) from error
    return model, info


def _load_source_config(source: str) -> PreTrainedConfig:
    from transformers import AutoConfig

    config: PreTrainedConfig = AutoConfig.from_pretrained(source)
    return config


def _vocabulary_size(config: PreTrainedConfig) -> int | None:
    return getattr(config.get_text_config(), "vocab_size", None)


def _resize_embeddings_and_describe(
    model: PreTrainedModel, source_vocabulary: int | None, requested_vocabulary: int | None
) -> list[str]:
    if source_vocabulary == requested_vocabulary:
        return []
    with _suppress_loading_reports_and_keep_bar_off():
        model.resize_token_embeddings(requested_vocabulary)
    return [f"{source_vocabulary} tokens to {requested_vocabulary}"]


def _refuse_missing_or_unused_weights(
    model: PreTrainedModel, loaded: LoadedNames, has_new_head: bool
) -> None:
    """Refuse missing or unused weights of the body, and missing weights of a required head."""
    missing = [
        name for name in loaded["missing"] if not has_new_head or _is_body_weight(name, model)
    ]
    unexpected = [name for name in loaded["unexpected"] if _is_body_weight(name, model)]
    problems = []
    if missing:
        problems.append(
            f"{len(missing)} of the model's weights are not in it: {first_names_and_count_of_rest(missing, _MAX_NAMED)}"
        )
    if unexpected:
        problems.append(
            f"{len(unexpected)} of its weights do not exist in the model: "
            f"{first_names_and_count_of_rest(unexpected, _MAX_NAMED)}"
        )
    if problems:
        remedy = (
            "to train anyway, with random values for new weights, set model.allow_partial: true"
        )
        raise InputError(f"model.pretrained: {'; '.join(problems)}; {remedy}")


def _is_body_weight(weight_name: str, model: PreTrainedModel) -> bool:
    """Return whether a weight belongs to the body, which all tasks share.

    A pooler belongs to the heads that use it.
    """
    if weight_name.endswith(_OLD_BUFFERS):
        return False
    prefix = f"{model.base_model_prefix}."
    parts = {part for part, _ in getattr(model, model.base_model_prefix, model).named_children()}
    inner = weight_name.removeprefix(prefix).partition(".")[0]
    return inner != "pooler" and (weight_name.startswith(prefix) or inner in parts)


def _is_head_with_other_label_count(
    mismatch: str | tuple[str, Sequence[int], Sequence[int]], model: PreTrainedModel
) -> bool:
    """Return whether a weight of another shape belongs to a head with another number of labels.

    transformers initializes such a weight at random.
    """
    if isinstance(mismatch, str):
        return not _is_body_weight(mismatch, model)
    name, source_shape, model_shape = mismatch
    return (
        not _is_body_weight(name, model)
        and model_shape[0] == model.config.num_labels
        and source_shape[1:] == model_shape[1:]
    )


def _mismatch_text(mismatch: str | tuple[str, Sequence[int], Sequence[int]]) -> str:
    # transformers 4.52 gives only the name.
    if isinstance(mismatch, str):
        return mismatch
    name, source_shape, model_shape = mismatch
    return f"{name} is {list(source_shape)}, the model's {list(model_shape)}"


def notes_on_weights_not_loaded(loaded: LoadedNames | None) -> tuple[str, ...]:
    """Return notes for the user on weights that were not loaded as they are."""
    # A head that starts at random is right for a new task, and wrong if the same task continues.
    notes = []
    if loaded and loaded["missing"]:
        count = len(loaded["missing"])
        names = first_names_and_count_of_rest(loaded["missing"], _MAX_NAMED)
        notes.append(
            f"model.pretrained: {count} of the model's weights are not in it and start at "
            f"random: {names}"
        )
    if loaded and loaded["unexpected"]:
        count = len(loaded["unexpected"])
        names = first_names_and_count_of_rest(loaded["unexpected"], _MAX_NAMED)
        notes.append(f"model.pretrained: {count} of its weights are not used: {names}")
    if loaded and loaded.get("relabelled"):
        relabelled_text = first_names_and_count_of_rest(loaded["relabelled"], _MAX_NAMED, "; ")
        notes.append(
            "model.pretrained: its output layer has a different number of labels; the model's "
            f"starts at random: {relabelled_text}"
        )
    if loaded:
        for change in loaded["resized"]:
            notes.append(
                f"model.pretrained: its vocabulary is resized, {change}; new tokens start near the "
                "others' mean"
            )
    return tuple(notes)


@contextlib.contextmanager
def _suppress_loading_reports_and_keep_bar_off() -> Iterator[None]:
    """Suppress transformers' progress bar and loading report while the context is open."""
    from transformers.utils import logging as theirs

    theirs.disable_progress_bar()
    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(_is_no_report)
    try:
        yield
    finally:
        logger.removeFilter(_is_no_report)


def _is_no_report(record: logging.LogRecord) -> bool:
    return not any(report_start in record.getMessage() for report_start in _REPORTS)


@dataclass(frozen=True)
class WeightFiles:
    """The files of a folder that has every parameter of a model, under its name and in its shape."""

    file_by_name: dict[str, Path]

    def read_parameter(self, name: str) -> torch.Tensor:
        """Return the values of a parameter, in the type of the file."""
        from safetensors import safe_open

        with safe_open(self.file_by_name[name], framework="pt") as file:
            values: torch.Tensor = file.get_tensor(name)
        return values


def may_weights_be_read_later(recipe: Recipe, model_type: str) -> bool:
    """Return whether nothing but the division over ranks needs the values of pretrained weights.

    Adapters are made beside them, a checkpoint has a fingerprint of frozen ones, and a new head has
    values of its own. Documents in one sample, and a chunked loss of a model that no test trains, are
    tried in a pass.
    """
    settings = recipe.model
    needs_values = settings.lora or settings.freeze or settings.quantize or settings.allow_partial
    needs_pass = recipe.data.separates_documents or model_type not in FAMILIES
    return bool(settings.pretrained) and not (
        needs_values or needs_pass or settings.traits.has_new_head
    )


@contextlib.contextmanager
def build_parameters_without_memory() -> Iterator[None]:
    """Let modules that are built have parameters on the meta device, and buffers with values."""
    register: Any = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        # A tied one is registered again.
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
        register(module, name, parameter)

    with replace_attribute_temporarily(nn.Module, "register_parameter", register_on_meta):
        yield


def weight_files_or_none(model: nn.Module, folder: Path) -> WeightFiles | None:
    """Return the files of a model's weights; None where transformers would change or miss some.

    Args:
        model: a model of transformers.
        folder: a folder with its weights, or the name of a model on the hub.
    """
    from safetensors import safe_open

    if _are_weights_converted(model):
        return None
    file_by_name, shape_by_name = {}, {}
    for path in sorted(folder.glob("model*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (no mapping)
                file_by_name[name] = path
                shape_by_name[name] = tuple(file.get_slice(name).get_shape())
    state_names = model.state_dict().keys()
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    tied_names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    has_all = all(shape_by_name.get(name) == shape for name, shape in shapes.items())
    # Neither saved buffers nor weights that the model lacks.
    has_no_others = tied_names == {*state_names} and tied_names >= shape_by_name.keys()
    return WeightFiles(file_by_name) if has_all and has_no_others else None


def _are_weights_converted(model: nn.Module) -> bool:
    """Return whether transformers stores the weights of this model in another form."""
    try:
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    # Before version 5 there were no conversions.
    except ImportError:
        return False
    config: Any = model.config
    names = (type(model).__name__, config.model_type)
    return any(get_checkpoint_conversion_mapping(name) for name in names)
