"""Facts that a trace of a model showed, beside its graph."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch.utils.weak import WeakTensorKeyDictionary

ContainerKeyAndValue = tuple[Any, Any, object]
"""A container, a key or index in it, and the object that replaces the entry there."""


@dataclass
class PythonReads:
    """Lines of the model's code that read values of tensors in Python, as `file:line`."""

    decisions: set[str] = field(default_factory=set)
    """Where a value may choose what the model computes."""
    checks: set[str] = field(default_factory=set)
    """Where a value is only checked, by an assertion or a condition under which the model raises."""
    sizes: set[str] = field(default_factory=set)
    later_sizes: set[str] = field(default_factory=set)
    """Where only sizes after the first one of an input are read, such as lengths."""
    ones: set[str] = field(default_factory=set)
    """Where a size is compared with 0 or 1 only, such as attention of one token."""
    buffers: set[str] = field(default_factory=set)
    masks: set[str] = field(default_factory=set)
    """Where torch's transformer layers check whether a mask is causal."""
    layer_paths: set[str] = field(default_factory=set)
    """Paths of the layers whose code makes decisions."""


@dataclass
class TraceFacts:
    """Facts that one trace of a model showed; the steps of its export fill it."""

    python_reads: PythonReads = field(default_factory=PythonReads)
    line_by_value: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)
    """The tensors that depend on the batch or on weights, with the line that computed each."""
    kept_entries: list[ContainerKeyAndValue] = field(default_factory=list)
    """Where the pass stored tensors outside its result, and what replaces them there."""
    state_paths: list[tuple[str, str]] = field(default_factory=list)
    """Places of the Python state that the passes read."""
    code_names: set[str] = field(default_factory=set)
    """Names in the code of the passes."""
    reads_grad_mode: bool = False
    """Whether the model reads it; the graph is then valid for one grad mode only."""
    has_checkpoints: bool = False
    label_density: float | None = None
    """The share of labels that are not ignored, if the trace left out the others' rows."""
    norm_paths: list[str] = field(default_factory=list)
    """Paths of the BatchNorm layers whose statistics a training pass updates."""
