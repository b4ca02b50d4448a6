"""Generate docs/reference/run-folder.md: the files of a run, and every field of its records.

The page is generated from the types of the records, so it always matches the files.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator

from ortlaunch import launch_plan
from ortlaunch.base import cause
from ortlaunch.run_folder import (
    engine_report,
    error_record,
    export_records,
    profile_record,
    records,
    resume_record,
    verdict,
)
from ortlaunch.run_folder.folder import FILES
from ortlaunch.tables.metrics import METRICS

_HEAD = """\
# The run folder, field by field

Made by `ortlaunch schema --run-folder > docs/reference/run-folder.md`; a test holds it to the code.

{folder}
A field whose value may be absent is left out of the file where it does not apply. Sizes are in bytes, times in seconds.
"""
# Records that share a file with another record, so no row of FILES names them.
_OTHERS = {
    "errors/rank_00003.json, stall.json, lost.json": "ErrorRecord",
    "job.json: verdict": "Verdict",
    "metrics.jsonl, evaluations": "EvaluationLine",
    "device.json, of format ondevice": "DeviceArtifacts",
}
_WORDS = {
    "str": "text",
    "int": "integer",
    "float": "number",
    "bool": "true, false",
    "None": "null",
    "Any": "any value",
    "object": "any value",
    "Json": "mapping",
    "Cause": "text",
}


def run_folder_manual_page_markdown() -> str:
    """Return the whole page."""
    modules = (
        launch_plan,
        engine_report,
        profile_record,
        records,
        resume_record,
        export_records,
        error_record,
        verdict,
        cause,
    )
    bodies = [ast.parse(inspect.getsource(module)).body for module in modules]
    types = {
        definition.name: definition
        for body in bodies
        for definition in body
        if isinstance(definition, ast.ClassDef) and definition.name not in _WORDS
    }
    parts = [_HEAD.format(folder=_file_table())]
    # A type that several records use is described once, at its first use.
    described_types = set[str]()
    for file, name in {**{row.name: row.record for row in FILES if row.record}, **_OTHERS}.items():
        parts += [f"## {file}", "", *_record_table_lines(types, name)]
        for inner in dict.fromkeys(
            definition
            for definition in _record_names_in_fields_depth_first(types, name)
            if definition not in described_types
        ):
            described_types.add(inner)
            parts += [
                f'<a id="{inner}"></a>',
                "",
                f"### {inner}",
                "",
                *_record_table_lines(types, inner),
            ]
    return "\n".join(parts).rstrip("\n") + "\n"


def _file_table() -> str:
    rows = (f"| `{row.name}` | {row.writer} | {row.contents} |\n" for row in FILES)
    return "".join(["| file | written by | contents |\n|---|---|---|\n", *rows])


def _record_names_in_fields_depth_first(
    class_definition_by_name: dict[str, ast.ClassDef], record_name: str
) -> Iterator[str]:
    for field in (
        node
        for node in class_definition_by_name[record_name].body
        if isinstance(node, ast.AnnAssign)
    ):
        for inner in (node.id for node in ast.walk(field.annotation) if isinstance(node, ast.Name)):
            if inner in class_definition_by_name:
                yield inner
                yield from _record_names_in_fields_depth_first(class_definition_by_name, inner)


def _record_table_lines(
    class_definition_by_name: dict[str, ast.ClassDef], record_name: str
) -> list[str]:
    body = class_definition_by_name[record_name].body
    # A table cell is one line, so texts lose their line breaks.
    lines = [
        _table_cell_text(ast.get_docstring(class_definition_by_name[record_name]) or ""),
        "",
        "| field | value | meaning |",
        "|---|---|---|",
    ]
    # The string after a field documents it; methods come last and are skipped.
    for field, manual in zip(body, body[1:]):
        if (
            record_name == "Evaluation"
            and isinstance(field, ast.AnnAssign)
            and ast.unparse(field.target) == "metrics"
        ):
            lines += _metric_rows()
        elif isinstance(field, ast.AnnAssign):
            lines.append(
                f"| `{ast.unparse(field.target)}` | "
                f"{_type_and_absence_text(class_definition_by_name, field)} | {_field_description(manual)} |"
            )
    return [*lines, ""]


def _metric_rows() -> Iterator[str]:
    for name, metric in METRICS.items():
        tasks = f" Of {', '.join(metric.measures)}." if metric.measures else ""
        value = "number or absent" if metric.measures else "number"
        yield f"| `{name}` | {value} | {metric.manual}{tasks} Best: {metric.better}. |"


def _type_and_absence_text(
    class_definition_by_name: dict[str, ast.ClassDef], field: ast.AnnAssign
) -> str:
    """Return the possible values of a field; for None: null, absent or {}."""
    type_text = _annotation_in_words(class_definition_by_name, field.annotation)
    if ast.unparse(field.target) in engine_report.EMPTY:
        return type_text.replace(" or null", " or {}")
    # `json_values_of_record` leaves a None out if it is the field's default.
    left_out = isinstance(field.value, ast.Constant) and field.value.value is None
    return type_text.replace(" or null", " or absent") if left_out else type_text


def _field_description(statement_after_field: ast.stmt) -> str:
    assert isinstance(statement_after_field, ast.Expr), ast.unparse(statement_after_field)
    return _table_cell_text(str(ast.literal_eval(statement_after_field.value)))


def _table_cell_text(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _annotation_in_words(
    class_definition_by_name: dict[str, ast.ClassDef], annotation: ast.expr
) -> str:
    if isinstance(annotation, ast.BinOp):
        return (
            f"{_annotation_in_words(class_definition_by_name, annotation.left)} or "
            f"{_annotation_in_words(class_definition_by_name, annotation.right)}"
        )
    if isinstance(annotation, ast.Subscript):
        arguments = (
            annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
        )
        last_argument = [argument for argument in arguments if ast.unparse(argument) != "..."][-1]
        # A tuple of (name, value) pairs is a mapping in JSON.
        if isinstance(last_argument, ast.Subscript) and ast.unparse(last_argument).startswith(
            "tuple[str, "
        ):
            return _annotation_in_words(
                class_definition_by_name, ast.Subscript(ast.Name("dict"), last_argument.slice)
            )
        container = "mapping" if ast.unparse(annotation.value) == "dict" else "list"
        return f"{container} of {_annotation_in_words(class_definition_by_name, last_argument)}"
    name = ast.unparse(annotation)
    return f"[{name}](#{name})" if name in class_definition_by_name else _WORDS[name]
