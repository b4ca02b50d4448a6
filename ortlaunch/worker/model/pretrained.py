"""Weights from a folder or the hub, and our report of them instead of transformers'.

A head that is new for the task, or has another number of labels, starts at random. The head of
another task is left out. Any other weight that is missing, left over or of another shape is
refused. If model.config.vocab_size changes the vocabulary, the embeddings are resized.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from ortlaunch.errors import InputError
from ortlaunch.json_types import Json

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

# `missing`: weights that the source lacks. `unexpected`: weights that only the source has.
# `resized`: a change of the vocabulary. `relabelled`: weights of a head for other labels.
Loaded = Mapping[str, list[str]]
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
_NAMED = 6


def load_pretrained(
    auto: Any,
    source: str,
    config: PreTrainedConfig,
    *,
    new_head: bool,
    partial: bool,
    **options: Any,
) -> tuple[nn.Module, Loaded]:
    """Load the model of an auto class with the weights of `source`.

    Args:
        auto: the auto class of transformers.
        source: a folder, or a name on the hub.
        config: the model's config. If its vocabulary differs from that of `source`, the embeddings
            are resized to it.
        new_head: whether the task's head may be missing, or have another number of labels.
        partial: whether any weights may be missing or left over.
        options: further arguments of `from_pretrained`.

    Raises:
        InputError: weights have another shape than the model's, are missing or left over, or cannot
            be read.
    """
    theirs = _config_of(source)
    own = _vocabulary(theirs)
    wanted = _vocabulary(config)
    # Load at the size of the source first; `_resize` then keeps the trained embeddings. Until then
    # a new token, such as padding, does not exist.
    new_tokens = {
        name: value
        for name, value in config.to_dict().items()
        if name.endswith("_token_id") and isinstance(value, int) and value >= (own or 0) > 0
    }
    for name in new_tokens:
        setattr(config, name, getattr(theirs, name, None))
    if own != wanted:
        config.get_text_config().vocab_size = own
    model, info = _load(auto, source, config=config, **options)
    relabelled = [
        found for found in info["mismatched_keys"] if new_head and _is_relabelled(found, model)
    ]
    wrong = sorted(_mismatch(found) for found in info["mismatched_keys"] if found not in relabelled)
    if wrong:
        raise InputError(
            f"model.pretrained: weights differ in shape from model.config: {_some(wrong, '; ')}"
        )
    loaded = {name: sorted(info[f"{name}_keys"]) for name in ("missing", "unexpected")}
    if not partial:
        _refuse_partial(model, loaded, new_head)
    resized = _resize(model, own, wanted)
    model.config.update(new_tokens)
    return model, {**loaded, "resized": resized, "relabelled": sorted(map(_mismatch, relabelled))}


def _load(auto: Any, source: str, **options: Any) -> tuple[PreTrainedModel, Json]:
    """Return the model and transformers' loading info."""
    from safetensors import SafetensorError

    try:
        with _without_reports():
            model, info = auto.from_pretrained(
                source, **options, output_loading_info=True, ignore_mismatched_sizes=True
            )
    # transformers raises OSError or ValueError for other faults; the caller reports those.
    except SafetensorError as error:
        raise InputError(
            f"model.pretrained: {source} has weights that cannot be read: {error}"
        ) from error
    return model, info


def _config_of(source: str) -> PreTrainedConfig:
    from transformers import AutoConfig

    config: PreTrainedConfig = AutoConfig.from_pretrained(source)
    return config


def _vocabulary(config: PreTrainedConfig) -> int | None:
    """Return the vocabulary size of a model, or None."""
    return getattr(config.get_text_config(), "vocab_size", None)


def _resize(model: PreTrainedModel, own: int | None, wanted: int | None) -> list[str]:
    """Resize the embeddings to the requested vocabulary; return a description of the change."""
    if own == wanted:
        return []
    with _without_reports():
        model.resize_token_embeddings(wanted)
    return [f"{own} tokens to {wanted}"]


def _refuse_partial(model: PreTrainedModel, loaded: Loaded, new_head: bool) -> None:
    """Refuse missing or unused weights of the body, and missing weights of a required head."""
    missing = [name for name in loaded["missing"] if not new_head or _is_body(name, model)]
    unexpected = [name for name in loaded["unexpected"] if _is_body(name, model)]
    said = []
    if missing:
        said.append(f"{len(missing)} of the model's weights are not in it: {_some(missing)}")
    if unexpected:
        said.append(
            f"{len(unexpected)} of its weights do not exist in the model: {_some(unexpected)}"
        )
    if said:
        mend = "to train anyway, with random values for new weights, set model.allow_partial: true"
        raise InputError(f"model.pretrained: {'; '.join(said)}; {mend}")


def _is_body(name: str, model: PreTrainedModel) -> bool:
    """Return whether a weight belongs to the body, which all tasks share.

    A pooler belongs to the heads that use it.
    """
    if name.endswith(_OLD_BUFFERS):
        return False
    prefix = f"{model.base_model_prefix}."
    parts = {part for part, _ in getattr(model, model.base_model_prefix, model).named_children()}
    inner = name.removeprefix(prefix).partition(".")[0]
    return inner != "pooler" and (name.startswith(prefix) or inner in parts)


def _is_relabelled(
    found: str | tuple[str, Sequence[int], Sequence[int]], model: PreTrainedModel
) -> bool:
    """Return whether a weight of another shape belongs to a head with another number of labels.

    transformers initializes such a weight at random.
    """
    if isinstance(found, str):
        return not _is_body(found, model)
    name, theirs, ours = found
    return (
        not _is_body(name, model) and ours[0] == model.config.num_labels and theirs[1:] == ours[1:]
    )


def _mismatch(found: str | tuple[str, Sequence[int], Sequence[int]]) -> str:
    # transformers 4.52 gives only the name.
    if isinstance(found, str):
        return found
    name, theirs, ours = found
    return f"{name} is {list(theirs)}, the model's {list(ours)}"


def loading_notes(loaded: Loaded | None) -> tuple[str, ...]:
    """Return notes for the user on weights that were not loaded as they are."""
    # A head that starts at random is right for a new task, and wrong if the same task continues.
    notes = []
    if loaded and loaded["missing"]:
        many = len(loaded["missing"])
        names = _some(loaded["missing"])
        notes.append(
            f"model.pretrained: {many} of the model's weights are not in it and start at "
            f"random: {names}"
        )
    if loaded and loaded["unexpected"]:
        many = len(loaded["unexpected"])
        names = _some(loaded["unexpected"])
        notes.append(f"model.pretrained: {many} of its weights are not used: {names}")
    if loaded and loaded.get("relabelled"):
        told = _some(loaded["relabelled"], "; ")
        notes.append(
            "model.pretrained: its output layer has a different number of labels; the model's "
            f"starts at random: {told}"
        )
    for change in loaded["resized"] if loaded else ():
        notes.append(
            f"model.pretrained: its vocabulary is resized, {change}; new tokens start near the "
            "others' mean"
        )
    return tuple(notes)


def _some(words: list[str], mark: str = ", ") -> str:
    rest = [f"and {len(words) - _NAMED} more"] if len(words) > _NAMED else []
    return mark.join([*words[:_NAMED], *rest])


@contextlib.contextmanager
def _without_reports() -> Iterator[None]:
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
    return not any(words in record.getMessage() for words in _REPORTS)
