"""`ortlaunch data show`: samples as the model will see them, and an audit of the data."""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ortlaunch.base.errors import escape_control_characters
from ortlaunch.base.json_types import Json
from ortlaunch.recipe import Recipe, parse_resolved_recipe
from ortlaunch.tables.tasks import ShowDataRequest
from ortlaunch.user_modules import append_factory_folders_to_sys_path
from ortlaunch.worker.data import LoadedData, Samples, collate_function_of_recipe
from ortlaunch.worker.data.samples import IGNORED
from ortlaunch.worker.data_audit import (
    AuditRow,
    PartAudit,
    audit_training_and_evaluation_samples,
    training_row_count_by_class_name,
)
from ortlaunch.worker.tasks.prepare_data import cache_data_showing_progress_and_take_notes

# Samples of each part that are audited.
_MAX_AUDITED = 20_000
# Bins of the histogram, and characters of its longest bar.
_BINS = 10
_BAR_CHARACTERS = 40
# Values of a tensor.
_FIRST_VALUES = 6
# Text that is not learned, and text that is: on a terminal, and elsewhere.
_COLOURS = (("\x1b[2m", "\x1b[0m"), ("\x1b[32m", "\x1b[0m"))
_BRACKETS = (("", ""), ("[[", "]]"))


def run(request: ShowDataRequest) -> None:
    """Print samples of a recipe's data, and the audit."""
    recipe = parse_resolved_recipe(request.recipe)
    append_factory_folders_to_sys_path(recipe, Path(request.modules))
    data, notes = cache_data_showing_progress_and_take_notes(recipe)
    parts = audit_training_and_evaluation_samples(data, _MAX_AUDITED)
    if parts:
        document_by_part = {
            part.key: _audit_json_with_spread_samples(part, request.samples, data) for part in parts
        }
    else:
        document_by_part = {
            key: _describe_spread_samples_and_their_batch(part, recipe, request.samples)
            for key, part in data.parts.items()
        }
    document = {
        "parts": document_by_part,
        "classes": dict(training_row_count_by_class_name(data).most_common()),
        "notes": notes,
    }
    if request.json:
        print(json.dumps(document, ensure_ascii=False, indent=2))
    elif parts:
        _print_samples_lengths_and_findings(parts, document)
    else:
        _print_value_descriptions(document)


def _describe_spread_samples_and_their_batch(
    samples: Samples, recipe: Recipe, max_samples: int
) -> dict[str, object]:
    """Return the values of some samples without text, evenly spread, and of a batch of them."""
    sample_indices = (
        np.linspace(0, len(samples) - 1, min(max_samples, len(samples))).astype(int).tolist()
    )
    shown_samples = [samples.sample(index, 0) for index in sample_indices]
    described = {
        f"sample {index:,}": _description_by_value_name(sample)
        for index, sample in zip(sample_indices, shown_samples)
    }
    batch = (
        {
            f"a batch of {len(shown_samples)}": _description_by_value_name(
                collate_function_of_recipe(recipe)(shown_samples)
            )
        }
        if shown_samples
        else {}
    )
    return {"samples": len(samples), "shown": {**described, **batch}}


def _description_by_value_name(sample_or_batch: Any) -> dict[str, str]:
    """Return type, shape, first values and range of each value of a sample or a batch."""
    # Samples for the user's own collate function, and batches of a LightningModule, have any form.
    if not isinstance(sample_or_batch, Mapping):
        sample_or_batch = dict(
            enumerate(
                sample_or_batch if isinstance(sample_or_batch, (list, tuple)) else [sample_or_batch]
            )
        )
    return {str(name): _type_shape_and_range_text(value) for name, value in sample_or_batch.items()}


def _type_shape_and_range_text(value: Any) -> str:
    try:
        tensor = torch.as_tensor(value)
    # torch raises all three; the user's own collate function may read such a value.
    except (TypeError, ValueError, RuntimeError):
        return f"{type(value).__name__} {value!r:.60}"
    values = ", ".join(f"{element:.4g}" for element in tensor.flatten()[:_FIRST_VALUES].tolist())
    text = f"{str(tensor.dtype).removeprefix('torch.')} {[*tensor.shape]}: {values}"
    # Complex numbers have no order.
    if tensor.numel() <= _FIRST_VALUES or tensor.is_complex():
        return text
    return f"{text}, ... from {tensor.min():.4g} to {tensor.max():.4g}"


def _audit_json_with_spread_samples(
    part: PartAudit, max_samples: int, data: LoadedData
) -> dict[str, object]:
    lengths = [len(row.ids) for row in part.rows]
    width = -(-(max(lengths) - min(lengths) + 1) // _BINS)
    sizes, edges = np.histogram(lengths, np.arange(min(lengths), max(lengths) + width + 1, width))
    by_sample = [[*rows] for _, rows in itertools.groupby(part.rows, lambda row: row.sample)]
    sample_places = np.linspace(0, len(by_sample) - 1, min(max_samples, len(by_sample))).astype(int)
    return {
        "samples": part.samples,
        "audited_rows": len(part.rows),
        "tokens": sum(lengths),
        "learned_tokens": sum(int(row.learned.sum()) for row in part.rows),
        "lengths": [
            {"up_to": int(edge) - 1, "rows": int(size)} for edge, size in zip(edges[1:], sizes)
        ],
        "findings": [finding._asdict() for finding in part.findings],
        "shown": [
            [_row_split_by_learned_or_label(row, data) for row in by_sample[sample_place]]
            for sample_place in sample_places
        ],
    }


def _row_split_by_learned_or_label(row: AuditRow, data: LoadedData) -> dict[str, object]:
    tags = np.full(len(row.ids), IGNORED) if row.tags is None else row.tags
    # A word with a class begins a piece, and so does each mark.
    marks = np.isin(row.ids, data.tokenizer.all_special_ids)
    starts = np.flatnonzero(
        np.diff(row.learned, prepend=False) if row.tags is None else (tags != IGNORED) | marks
    )
    pieces = zip(*(np.split(row_array, starts) for row_array in (row.ids, row.learned, tags)))
    names = data.class_names or range(data.classes)
    return {
        "sample": row.sample,
        "tokens": len(row.ids),
        "label": data.tokenizer.decode(row.label)
        if data.recipe.model.traits.writes
        else _names_of_label(row.label, data.class_names),
        "pieces": [
            {
                "text": data.tokenizer.decode(ids.tolist()),
                "learned": bool(learned[0]),
                "label": str(names[tag[0]]) if tag[0] != IGNORED else None,
            }
            for ids, learned, tag in pieces
            if len(ids)
        ],
    }


def _names_of_label(label: Any, class_names: Sequence[str]) -> Any:
    """Return the class names of a row's label, or the label itself where there are none."""
    if label is None or not class_names:
        return label
    if isinstance(label, list):
        return [class_names[class_number] for class_number in label]
    return class_names[label]


def _print_samples_lengths_and_findings(parts: list[PartAudit], audit_document: Json) -> None:
    marks = _COLOURS if sys.stdout.isatty() and "NO_COLOR" not in os.environ else _BRACKETS
    for key, part in audit_document["parts"].items():
        for row in itertools.chain(*part["shown"]):
            label = (
                ""
                if row["label"] is None
                else f", label {escape_control_characters(str(row['label']))}"
            )
            print(f"{key}, sample {row['sample']:,}: {row['tokens']:,} tokens{label}")
            # Line ends and tabs stay; other control characters are shown as escapes.
            texts = (
                re.sub(
                    r"[^\n\t]+", lambda match: escape_control_characters(match[0]), entry["text"]
                )
                for entry in row["pieces"]
            )
            shown = ((*marks[entry["learned"]], entry["label"]) for entry in row["pieces"])
            piece_texts = (
                f"{a}{text}{b}" + (f"/{escape_control_characters(label)} " if label else "")
                for text, (a, b, label) in zip(texts, shown)
            )
            print(*piece_texts, sep="", end="\n\n")
    print(
        f"learned text is {'[[so]]' if marks is _BRACKETS else 'green'}",
        *audit_document["notes"],
        sep="\n",
    )
    for part in parts:
        bins = audit_document["parts"][part.key]["lengths"]
        print(part.summary_lines()[0])
        for entry in bins:
            bar = "#" * -(-_BAR_CHARACTERS * entry["rows"] // max(entry["rows"] for entry in bins))
            print(f"  up to {entry['up_to']:>7,} tokens {entry['rows']:>7,} {bar}".rstrip())
    classes = [f"class {name}: {count:,} rows" for name, count in audit_document["classes"].items()]
    findings = [line for part in parts for line in part.summary_lines()[1:]] or ["no findings"]
    print(*map(escape_control_characters, [*classes, *findings]), sep="\n")


def _print_value_descriptions(document: Json) -> None:
    for key, part in document["parts"].items():
        for name, values in part["shown"].items():
            print(
                f"{key}, {name}:",
                *(
                    f"  {value_name} {escape_control_characters(description)}"
                    for value_name, description in values.items()
                ),
                sep="\n",
            )
        print(f"{key}: {part['samples']:,} samples")
    classes = (f"class {name}: {count:,} rows" for name, count in document["classes"].items())
    print(*document["notes"], *map(escape_control_characters, classes), sep="\n")
