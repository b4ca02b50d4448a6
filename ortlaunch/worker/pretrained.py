"""Weights from a folder or the hub, and what of them was not taken, in our words instead of transformers' report."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from ortlaunch.errors import InputError

Loaded = Mapping[str, list[str]]  # names of weights: `missing` in the source, `unexpected` there
_REPORTS = ("LOAD REPORT", "Some weights of")  # transformers 5, and before
_NAMED = 6


def load_pretrained(auto: Any, source: str, **options: Any) -> tuple[nn.Module, Loaded]:
    """The model of an auto class with the weights of `source`.

    Raises:
        InputError: weights have another shape than the model's.
    """
    with _without_reports():
        model, info = auto.from_pretrained(source, **options, output_loading_info=True, ignore_mismatched_sizes=True)
    wrong = sorted(map(_mismatch, info["mismatched_keys"]))
    if wrong:
        raise InputError(f"model.pretrained: weights of another shape than model.config's: {_some(wrong, '; ')}")
    return model, {name: sorted(info[f"{name}_keys"]) for name in ("missing", "unexpected")}


def _mismatch(found: str | tuple[str, Any, Any]) -> str:
    if isinstance(found, str):  # transformers 4.52 gives the name alone
        return found
    name, theirs, ours = found
    return f"{name} is {list(theirs)}, the model's {list(ours)}"


def loading_notes(loaded: Loaded | None) -> tuple[str, ...]:
    """For a person: a head that starts at random is right for a new task, and wrong where the same one goes on."""
    notes = []
    if loaded and loaded["missing"]:
        many, names = len(loaded["missing"]), _some(loaded["missing"])
        notes.append(f"model.pretrained: {many} of the model's weights are not in it and start at random: {names}")
    if loaded and loaded["unexpected"]:
        many, names = len(loaded["unexpected"]), _some(loaded["unexpected"])
        notes.append(f"model.pretrained: {many} of its weights are not used: {names}")
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
