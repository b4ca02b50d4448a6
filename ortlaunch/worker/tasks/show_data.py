"""`ortlaunch data show`: samples as the model will see them, and an audit of the data."""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ortlaunch.errors import escape_control_characters
from ortlaunch.json_types import Json
from ortlaunch.recipe import Recipe, parse_resolved
from ortlaunch.recipe.fields.data import uses_template
from ortlaunch.tasks import ShowDataRequest
from ortlaunch.user_modules import add_factory_folders_to_path
from ortlaunch.worker.data import LoadedData, Samples, stack_of
from ortlaunch.worker.data.chat_rows import chats_read
from ortlaunch.worker.data.samples import IGNORED
from ortlaunch.worker.data_audit import AuditFinding, AuditRow, PartAudit, audits, class_counts
from ortlaunch.worker.tasks.prepare_data import load

# Samples of each part, and raw chats of each source, that are audited.
_MOST = 20_000
_ROLES = {"system", "user", "assistant", "tool"}
# Bins of the histogram, and characters of its longest bar.
_BINS = 10
_BAR = 40
# Values of a tensor.
_FIRST = 6
# Text that is not learned, and text that is: on a terminal, and elsewhere.
_COLOURS = (("\x1b[2m", "\x1b[0m"), ("\x1b[32m", "\x1b[0m"))
_BRACKETS = (("", ""), ("[[", "]]"))


def run(request: ShowDataRequest) -> None:
    """Print samples of a recipe's data, and the audit."""
    recipe = parse_resolved(request.recipe)
    add_factory_folders_to_path(recipe, Path(request.modules))
    data, notes = load(recipe)
    parts = audits(data, _MOST)
    if parts:
        parts[0].findings.extend(raw_findings(recipe))
        shown = {part.key: _document(part, request.samples, data) for part in parts}
    else:
        shown = {key: _values(part, recipe, request.samples) for key, part in data.parts.items()}
    found = {"parts": shown, "classes": dict(class_counts(data).most_common()), "notes": notes}
    if request.json:
        print(json.dumps(found, ensure_ascii=False, indent=2))
    elif parts:
        _print(parts, found)
    else:
        _print_values(found)


def raw_findings(recipe: Recipe) -> Iterator[AuditFinding]:
    """Yield findings on messages as the rows have them: system messages and roles."""
    systems = Counter[str]()
    roles = Counter[str]()
    for source in (each for _, each in recipe.data.sources() if uses_template(each)):
        for chat, _ in itertools.islice(chats_read(source), _MOST):
            first = chat.messages[0]
            systems[repr(first["content"][:40]) if first["role"] == "system" else "none"] += 1
            roles.update(each["role"] for each in chat.messages if each["role"] not in _ROLES)
    # Where nearly each chat has its own, they are a part of the question.
    few = 1 < len(systems) <= max(2, sum(systems.values()) // 10)
    for name, counts, text in (
        ("system_variants", systems if few else {}, "chats have several system messages"),
        ("unknown_roles", roles, "messages have roles that data.train.roles can map"),
    ):
        if counts:
            kinds = ", ".join(f"{each} ({count:,})" for each, count in counts.items())
            yield AuditFinding(name, f"{text}: {kinds:.200}")


def _values(samples: Samples, recipe: Recipe, count: int) -> Json:
    """Return the values of some samples without text, evenly spread, and of a batch of them."""
    chosen = np.linspace(0, len(samples) - 1, min(count, len(samples))).astype(int).tolist()
    shown = [samples.sample(index, 0) for index in chosen]
    described = {f"sample {index:,}": _described(each) for index, each in zip(chosen, shown)}
    batch = {f"a batch of {len(shown)}": _described(stack_of(recipe)(shown))} if shown else {}
    return {"samples": len(samples), "shown": {**described, **batch}}


def _described(sample: Any) -> dict[str, str]:
    """Return type, shape, first values and range of each value of a sample or a batch."""
    # Samples for the user's own collate function, and batches of a LightningModule, have any form.
    if not isinstance(sample, Mapping):
        sample = dict(enumerate(sample if isinstance(sample, (list, tuple)) else [sample]))
    return {str(name): _form(value) for name, value in sample.items()}


def _form(value: Any) -> str:
    try:
        tensor = torch.as_tensor(value)
    # torch raises all three; the user's own collate function may read such a value.
    except (TypeError, ValueError, RuntimeError):
        return f"{type(value).__name__} {value!r:.60}"
    text = f"{str(tensor.dtype).removeprefix('torch.')} {[*tensor.shape]}: "
    text += ", ".join(f"{each:.4g}" for each in tensor.flatten()[:_FIRST].tolist())
    # Complex numbers have no order.
    if tensor.numel() <= _FIRST or tensor.is_complex():
        return text
    return f"{text}, ... from {tensor.min():.4g} to {tensor.max():.4g}"


def _document(part: PartAudit, count: int, data: LoadedData) -> Json:
    """Return the audit of a part with some samples, evenly spread."""
    lengths = [len(row.ids) for row in part.rows]
    width = -(-(max(lengths) - min(lengths) + 1) // _BINS)
    sizes, edges = np.histogram(lengths, np.arange(min(lengths), max(lengths) + width + 1, width))
    by_sample = [[*rows] for _, rows in itertools.groupby(part.rows, lambda row: row.sample)]
    chosen = np.linspace(0, len(by_sample) - 1, min(count, len(by_sample))).astype(int)
    return {
        "samples": part.samples,
        "audited_rows": len(part.rows),
        "tokens": sum(lengths),
        "learned_tokens": sum(int(row.learned.sum()) for row in part.rows),
        "lengths": [
            {"up_to": int(edge) - 1, "rows": int(size)} for edge, size in zip(edges[1:], sizes)
        ],
        "findings": [each._asdict() for each in part.findings],
        "shown": [[_pieces(row, data) for row in by_sample[place]] for place in chosen],
    }


def _pieces(row: AuditRow, data: LoadedData) -> Json:
    tags = np.full(len(row.ids), IGNORED) if row.tags is None else row.tags
    # A word with a class begins a piece, and so does each mark.
    marks = np.isin(row.ids, data.tokenizer.all_special_ids)
    starts = np.flatnonzero(
        np.diff(row.learned, prepend=False) if row.tags is None else (tags != IGNORED) | marks
    )
    pieces = zip(*(np.split(each, starts) for each in (row.ids, row.learned, tags)))
    names = data.class_names or range(data.classes)
    return {
        "sample": row.sample,
        "tokens": len(row.ids),
        "label": names[row.label] if row.label is not None and data.class_names else row.label,
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


def _print(parts: list[PartAudit], found: Json) -> None:
    marks = _COLOURS if sys.stdout.isatty() and "NO_COLOR" not in os.environ else _BRACKETS
    for key, part in found["parts"].items():
        for row in itertools.chain(*part["shown"]):
            label = (
                ""
                if row["label"] is None
                else f", label {escape_control_characters(str(row['label']))}"
            )
            print(f"{key}, sample {row['sample']:,}: {row['tokens']:,} tokens{label}")
            # Line ends and tabs stay; other control characters are shown as escapes.
            texts = (
                re.sub(r"[^\n\t]+", lambda of: escape_control_characters(of[0]), each["text"])
                for each in row["pieces"]
            )
            shown = ((*marks[each["learned"]], each["label"]) for each in row["pieces"])
            words = (
                f"{a}{text}{b}" + (f"/{escape_control_characters(label)} " if label else "")
                for text, (a, b, label) in zip(texts, shown)
            )
            print(*words, sep="", end="\n\n")
    print(
        f"learned text is {'[[so]]' if marks is _BRACKETS else 'green'}", *found["notes"], sep="\n"
    )
    for part in parts:
        bins = found["parts"][part.key]["lengths"]
        print(part.lines()[0])
        for each in bins:
            bar = "#" * -(-_BAR * each["rows"] // max(each["rows"] for each in bins))
            print(f"  up to {each['up_to']:>7,} tokens {each['rows']:>7,} {bar}".rstrip())
    classes = [f"class {name}: {count:,} rows" for name, count in found["classes"].items()]
    findings = [line for part in parts for line in part.lines()[1:]] or ["no findings"]
    print(*map(escape_control_characters, [*classes, *findings]), sep="\n")


def _print_values(found: Json) -> None:
    for key, part in found["parts"].items():
        for name, values in part["shown"].items():
            print(f"{key}, {name}:")
            print(
                *(f"  {each} {escape_control_characters(form)}" for each, form in values.items()),
                sep="\n",
            )
        print(f"{key}: {part['samples']:,} samples")
    classes = (f"class {name}: {count:,} rows" for name, count in found["classes"].items())
    print(*found["notes"], *map(escape_control_characters, classes), sep="\n")
