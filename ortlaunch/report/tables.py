"""Tables of a report: a row for each fact, a column for each run; a fact that no run has is left out. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ortlaunch.report.markup import Html, tag
from ortlaunch.report.records import Record

Fact = tuple[str, Callable[[Record], object]]


def facts(records: Sequence[Record], rows: Iterable[Fact]) -> Html | None:
    """A table of facts; None where no run has any."""
    known = [(name, [told(read, record) for record in records]) for name, read in rows]
    known = [(name, values) for name, values in known if any(value not in (None, "", [], {}) for value in values)]
    if not known:
        return None
    head = [] if len(records) == 1 else [tag("tr", tag("th"), *(tag("th", record.label) for record in records))]
    body = [tag("tr", tag("th", name), *(tag("td", text(value)) for value in values)) for name, values in known]
    return tag("div", tag("table", tag("thead", *head), tag("tbody", *body)), class_="wide")


def told(read: Callable[[Record], Any], record: Record) -> Any:
    """What a record says; where another version of ortlaunch wrote it, or it is damaged, that this cannot be told."""
    try:
        return read(record)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        return tag("p", f"cannot be told of this run's files: {type(error).__name__}: {error}", class_="warn")


def listing(head: Sequence[str], rows: Iterable[Sequence[object]]) -> Html:
    """A table of records; numbers stand to the right."""
    rows = list(rows)
    kinds = [{type(row[at]) for row in rows} - {type(None)} for at in range(len(head))]
    right = [bool(kind) and kind <= {int, float} for kind in kinds]
    classes = ["n" if each else None for each in right]
    top = tag("tr", *(tag("th", name, class_=kind) for name, kind in zip(head, classes)))
    body = [tag("tr", *(tag("td", text(cell), class_=kind) for cell, kind in zip(row, classes))) for row in rows]
    return tag("div", tag("table", top, *body), class_="scroll")


def text(value: object) -> object:
    """A value as a cell says it."""
    if isinstance(value, Html):
        return value
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.6g}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, dict):
        return "\n".join(f"{key}: {_inside(item)}" for key, item in value.items()) or "-"
    if isinstance(value, (list, tuple)):
        return "\n".join(str(_inside(item)) for item in value) or "-"
    return value


def cards(pieces: Iterable[tuple[Record, Html | None]], names: bool) -> Html | None:
    """A card for each run that has something."""
    found = [(record, piece) for record, piece in pieces if piece is not None]
    if not found:
        return None
    inside = [tag("div", tag("h3", record.label) if names else None, piece, class_="card") for record, piece in found]
    return tag("div", *inside, class_="grid")


def _inside(value: Any) -> object:
    return json.dumps(value) if isinstance(value, (dict, list)) else text(value)
