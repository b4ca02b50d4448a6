"""Weights from a folder or the hub, and what of them was not taken, in our words instead of transformers' report.

A head that is new for the task, or of another number of labels, starts at random; another task's head is left out. Any
other weight that is missing, has no place or another shape is refused. A vocabulary that model.config.vocab_size
changes is resized.
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

# Names of weights: `missing` in the source, `unexpected` there; what was `resized`; a head `relabelled`.
Loaded = Mapping[str, list[str]]
_REPORTS = (
    "LOAD REPORT",
    "Some weights of",
    "The new ",
)  # transformers 5, before, and of resized embeddings
_OLD_BUFFERS = (
    "position_ids",
    "inv_freq",
    "masked_bias",
)  # in files of earlier releases; they are computed now
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
    """The model of an auto class with the weights of `source`.

    Args:
        config: of the model; a vocabulary of another size than that of `source` is resized to.
        new_head: whether the task's head may be missing, or of another number of labels.
        partial: whether any weights may be missing, or left over.

    Raises:
        InputError: weights have another shape than the model's, are missing or left over, or cannot be read.
    """
    own = _vocabulary(_config_of(source))
    wanted = _vocabulary(config)
    if own != wanted:
        config.get_text_config().vocab_size = own
    model, info = _load(auto, source, config=config, **options)
    relabelled = [
        found for found in info["mismatched_keys"] if new_head and _is_relabelled(found, model)
    ]
    wrong = sorted(_mismatch(found) for found in info["mismatched_keys"] if found not in relabelled)
    if wrong:
        raise InputError(
            f"model.pretrained: weights of another shape than model.config's: {_some(wrong, '; ')}"
        )
    loaded = {name: sorted(info[f"{name}_keys"]) for name in ("missing", "unexpected")}
    if not partial:
        _refuse_partial(model, loaded, new_head)
    return model, {
        **loaded, "resized": _resize(model, own, wanted), "relabelled": sorted(map(_mismatch, relabelled))
    }  # fmt: skip


def _load(auto: Any, source: str, **options: Any) -> tuple[PreTrainedModel, Json]:
    """Model and loading info of transformers."""
    from safetensors import SafetensorError

    try:
        with _without_reports():
            model, info = auto.from_pretrained(
                source, **options, output_loading_info=True, ignore_mismatched_sizes=True
            )
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
    """Words of a model."""
    return getattr(config.get_text_config(), "vocab_size", None)


def _resize(model: PreTrainedModel, own: int | None, wanted: int | None) -> list[str]:
    """To as many words as are wanted; what was done."""
    if own == wanted:
        return []
    with _without_reports():
        model.resize_token_embeddings(wanted)
    return [f"{own} words to {wanted}"]


def _refuse_partial(model: PreTrainedModel, loaded: Loaded, new_head: bool) -> None:
    """Weights of a body that are missing or left over, and those of a head that should have been there."""
    missing = [name for name in loaded["missing"] if not new_head or _is_body(name, model)]
    unexpected = [name for name in loaded["unexpected"] if _is_body(name, model)]
    said = []
    if missing:
        said.append(f"{len(missing)} of the model's weights are not in it: {_some(missing)}")
    if unexpected:
        said.append(
            f"{len(unexpected)} of its weights have no place in the model: {_some(unexpected)}"
        )
    if said:
        mend = "to train on even so, new weights from random numbers, model.allow_partial: true"
        raise InputError(f"model.pretrained: {'; '.join(said)}; {mend}")


def _is_body(name: str, model: PreTrainedModel) -> bool:
    """Whether a weight is of what all tasks share; a pooler is of the heads that use it."""
    if name.endswith(_OLD_BUFFERS):
        return False
    prefix = f"{model.base_model_prefix}."
    parts = {part for part, _ in getattr(model, model.base_model_prefix, model).named_children()}
    inner = name.removeprefix(prefix).partition(".")[0]
    return inner != "pooler" and (name.startswith(prefix) or inner in parts)


def _is_relabelled(
    found: str | tuple[str, Sequence[int], Sequence[int]], model: PreTrainedModel
) -> bool:
    """Whether a weight of another shape is a head's for another number of labels; transformers made it anew."""
    if isinstance(found, str):
        return not _is_body(found, model)
    name, theirs, ours = found
    return (
        not _is_body(name, model) and ours[0] == model.config.num_labels and theirs[1:] == ours[1:]
    )


def _mismatch(found: str | tuple[str, Sequence[int], Sequence[int]]) -> str:
    if isinstance(found, str):  # transformers 4.52 gives the name alone
        return found
    name, theirs, ours = found
    return f"{name} is {list(theirs)}, the model's {list(ours)}"


def loading_notes(loaded: Loaded | None) -> tuple[str, ...]:
    """For a person: a head that starts at random is right for a new task, and wrong where the same one goes on."""
    notes = []
    if loaded and loaded["missing"]:
        many = len(loaded["missing"])
        names = _some(loaded["missing"])
        notes.append(
            f"model.pretrained: {many} of the model's weights are not in it and start at random: {names}"
        )
    if loaded and loaded["unexpected"]:
        many = len(loaded["unexpected"])
        names = _some(loaded["unexpected"])
        notes.append(f"model.pretrained: {many} of its weights are not used: {names}")
    if loaded and loaded.get("relabelled"):
        told = _some(loaded["relabelled"], "; ")
        notes.append(
            f"model.pretrained: its head is of another number of labels; the model's starts at random: {told}"
        )
    for change in loaded["resized"] if loaded else ():
        notes.append(
            f"model.pretrained: its vocabulary is resized, {change}; new words start near the others' mean"
        )
    return tuple(notes)


def _some(words: list[str], mark: str = ", ") -> str:
    rest = [f"and {len(words) - _NAMED} more"] if len(words) > _NAMED else []
    return mark.join([*words[:_NAMED], *rest])


@contextlib.contextmanager
def _without_reports() -> Iterator[None]:
    """While open, transformers draws no bar and writes no report of what it loaded."""
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
