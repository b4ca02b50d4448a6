"""Generate docs/run-folder.md: the files of a run, and every field of its records.

The page is generated from the types of the records, so it always matches the files.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator

from ortlaunch import launch_plan
from ortlaunch.evaluation_metrics import METRICS
from ortlaunch.run_folder import (
    engine_report,
    export_records,
    profile_record,
    records,
    resume_record,
)
from ortlaunch.run_folder.folder import FILES

_HEAD = """\
# The run folder, field by field

Made by `ortlaunch schema --run-folder > docs/run-folder.md`; a test holds it to the code.

{folder}
A field whose value may be absent is left out of the file where it does not apply. Sizes are in bytes, times in seconds.
"""
# Records that share a file with another record, so no row of FILES names them.
_OTHERS = {
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
}


def markdown() -> str:
    """Return the whole page."""
    modules = (launch_plan, engine_report, profile_record, records, resume_record, export_records)
    bodies = [ast.parse(inspect.getsource(module)).body for module in modules]
    types = {each.name: each for body in bodies for each in body if isinstance(each, ast.ClassDef)}
    parts = [_HEAD.format(folder=_folder())]
    # A type that several records use is described once, at its first use.
    told = set[str]()
    for file, name in {**{row.name: row.record for row in FILES if row.record}, **_OTHERS}.items():
        parts += [f"## {file}", "", *_section(types, name)]
        for inner in dict.fromkeys(each for each in _inside(types, name) if each not in told):
            told.add(inner)
            parts += [f'<a id="{inner}"></a>', "", f"### {inner}", "", *_section(types, inner)]
    return "\n".join(parts).rstrip("\n") + "\n"


def _folder() -> str:
    """Return the table of files."""
    rows = (f"| `{row.name}` | {row.writer} | {row.contents} |\n" for row in FILES)
    return "".join(["| file | written by | contents |\n|---|---|---|\n", *rows])


def _inside(types: dict[str, ast.ClassDef], name: str) -> Iterator[str]:
    """Yield the record types of a type's fields, depth first."""
    for field in (each for each in types[name].body if isinstance(each, ast.AnnAssign)):
        for inner in (each.id for each in ast.walk(field.annotation) if isinstance(each, ast.Name)):
            if inner in types:
                yield inner
                yield from _inside(types, inner)


def _section(types: dict[str, ast.ClassDef], name: str) -> list[str]:
    body = types[name].body
    # A table cell is one line, so texts lose their line breaks.
    lines = [
        _plain(ast.get_docstring(types[name]) or ""),
        "",
        "| field | value | meaning |",
        "|---|---|---|",
    ]
    # The string after a field documents it; methods come last and are skipped.
    for field, manual in zip(body, body[1:]):
        if (
            name == "Evaluation"
            and isinstance(field, ast.AnnAssign)
            and ast.unparse(field.target) == "metrics"
        ):
            lines += _metrics()
        elif isinstance(field, ast.AnnAssign):
            lines.append(
                f"| `{ast.unparse(field.target)}` | {_value(types, field)} | {_manual(manual)} |"
            )
    return [*lines, ""]


def _metrics() -> Iterator[str]:
    """Yield a line for each row of the table of metrics."""
    for name, metric in METRICS.items():
        tasks = f" Of {', '.join(metric.measures)}." if metric.measures else ""
        value = "number or absent" if metric.measures else "number"
        yield f"| `{name}` | {value} | {metric.manual}{tasks} Best: {metric.better}. |"


def _value(types: dict[str, ast.ClassDef], field: ast.AnnAssign) -> str:
    """Return the possible values of a field; for None: null, absent or {}."""
    kind = _kind(types, field.annotation)
    if ast.unparse(field.target) in engine_report.EMPTY:
        return kind.replace(" or null", " or {}")
    # `as_json` leaves a None out if it is the field's default.
    left_out = isinstance(field.value, ast.Constant) and field.value.value is None
    return kind.replace(" or null", " or absent") if left_out else kind


def _manual(below: ast.stmt) -> str:
    """Return the text under a field."""
    assert isinstance(below, ast.Expr), ast.unparse(below)
    return _plain(str(ast.literal_eval(below.value)))


def _plain(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _kind(types: dict[str, ast.ClassDef], form: ast.expr) -> str:
    """Return an annotation in words."""
    if isinstance(form, ast.BinOp):
        return f"{_kind(types, form.left)} or {_kind(types, form.right)}"
    if isinstance(form, ast.Subscript):
        inside = form.slice.elts if isinstance(form.slice, ast.Tuple) else [form.slice]
        inner = [each for each in inside if ast.unparse(each) != "..."][-1]
        # A tuple of (name, value) pairs is a mapping in JSON.
        if isinstance(inner, ast.Subscript) and ast.unparse(inner).startswith("tuple[str, "):
            return _kind(types, ast.Subscript(ast.Name("dict"), inner.slice))
        return (
            f"{'mapping' if ast.unparse(form.value) == 'dict' else 'list'} of {_kind(types, inner)}"
        )
    name = ast.unparse(form)
    return f"[{name}](#{name})" if name in types else _WORDS[name]
