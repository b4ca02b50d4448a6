"""Values of the report's tables: a row for each fact, a column for each run. Pure.

A fact without a value in any run is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from markupsafe import Markup

from ortlaunch.report.records import Record

Fact = tuple[str, Callable[[Record], object]]


def fact_rows_with_any_value(
    run_records: Sequence[Record], fact_readers: Iterable[Fact]
) -> list[tuple[str, list[object]]]:
    """Return the name and the values of each row."""
    named_values = [
        (name, [read_value_or_warning_markup(read_fact, record) for record in run_records])
        for name, read_fact in fact_readers
    ]
    return [
        (name, values)
        for name, values in named_values
        # 0 and false are values; they keep their row.
        if any(value not in (None, "", [], {}) for value in values)
    ]


def values_of_runs_with_some_value(
    records: Sequence[Record], read_fact: Callable[[Record], object]
) -> list[tuple[Record, object]]:
    """Return the values of each run that has some."""
    values_by_record = [
        (record, read_value_or_warning_markup(read_fact, record)) for record in records
    ]
    return [(record, value) for record, value in values_by_record if value is not None]


def read_value_or_warning_markup(read_fact: Callable[[Record], object], run_record: Record) -> Any:
    """Return a record's value, or a warning that it cannot be read.

    The files may be damaged, or be written by another version of ortlaunch.
    """
    try:
        return read_fact(run_record)
    # The errors of reading a document of another form; anything else is a bug and is raised.
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        return warning_markup(f"this section cannot be shown: {type(error).__name__}: {error}")


def warning_markup(message: object) -> Markup:
    """Return a problem as a cell shows it."""
    return Markup('<p class="warn">{}</p>').format(message)


def formatted_cell_value(value: object) -> object:
    """Return a value as a cell shows it."""
    if isinstance(value, Markup):
        return value
    if value is None or value == "":
        return "-"
    # Before int: bool is a subclass of int.
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.6g}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, dict):
        return "\n".join(f"{key}: {_nested_cell_value(item)}" for key, item in value.items()) or "-"
    if isinstance(value, (list, tuple)):
        return "\n".join(str(_nested_cell_value(item)) for item in value) or "-"
    return value


def _nested_cell_value(value: object) -> object:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_nested_cell_value(item)}" for key, item in value.items()) or "-"
    if isinstance(value, (list, tuple)):
        return ", ".join(str(_nested_cell_value(item)) for item in value) or "-"
    return formatted_cell_value(value)
