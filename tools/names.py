"""Count identifiers that explain little, and fail above the limits.

    python tools/names.py [FOLDER] [--list PATH...]

The table has a row for each package. --list prints each counted name of some paths. The counts are
a floor: a stranger is to understand a signature without its body.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TypeGuard

VAGUE = frozenset(
    [
        "found",
        "told",
        "said",
        "asked",
        "whole",
        "made",
        "words",
        "known",
        "wrong",
        "there",
        "seen",
        "taken",
        "own",
        "rest",
        "each",
        "here",
        "now",
        "given",
        "chosen",
        "wanted",
        "before",
        "after",
        "kind",
        "place",
        "why",
        "what",
        "one",
        "such",
        "few",
        "left",
        "setting",
        "again",
        "warm",
        "first",
        "number",
        "mine",
    ]
)
PARTICIPLE = re.compile(
    r"[a-z]+ed|written|taken|left|kept|shown|drawn|given|put|seen|known|told|made|begun|found|sent"
    r"|held|cut|set|run"
)
PREPOSITION = re.compile(
    r"(?:with|without|of|by|on|in|for|at|from|as|to|beside|instead|after|before)(?:_|$)"
)
PREDICATE = re.compile(r"(?:is|has|can)_")
ALIAS = re.compile(r"[A-Z][A-Za-z]*[a-z][A-Za-z]*")
DOCUMENTED = re.compile(r"^ {4}(\w+(?:, \w+)*): ", re.MULTILINE)
UNTYPED = re.compile(r"\bdict\[str, Any\]|\bJson\b")
UNTYPED_HOME = "json_types"  # the module that defines the alias


class Finding(NamedTuple):
    """A name that explains little."""

    rule: str
    name: str
    line: int


class Counts(NamedTuple):
    """The totals of some files."""

    bindings: int = 0
    functions: int = 0
    lines: int = 0


class Limit(NamedTuple):
    """The most findings of a rule, of each `scale` of a total."""

    rule: str
    total: str
    scale: int
    most: float


LIMITS = (
    Limit("vague binding", "bindings", 1000, 5),
    Limit("participle", "functions", 100, 1),
    Limit("preposition", "functions", 100, 2.5),
    Limit("one word", "functions", 100, 45),
    Limit("predicate without an answer", "functions", 100, 0),
    Limit("argument without a parameter", "functions", 100, 0),
    Limit("untyped document", "lines", 1000, 3),
)


def is_plain_function(node: ast.AST) -> TypeGuard[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Return whether a node defines a function that is called by its name: no property."""
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or node.name.startswith("__"):
        return False
    names = {ast.unparse(decorator) for decorator in node.decorator_list}
    return not names & {"property", "functools.cached_property", "cached_property"}


def binding(node: ast.AST) -> str | None:
    """Return the name that a node binds to a value, if any."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return node.id
    return node.arg if isinstance(node, ast.arg) else None


def type_name(node: ast.AST) -> str | None:
    """Return the public name of a class, or of an alias such as `Batch = dict[str, Tensor]`."""
    name = node.name if isinstance(node, ast.ClassDef) else ""
    if isinstance(node, ast.Assign) and isinstance(node.value, (ast.Subscript, ast.BinOp)):
        name = ast.unparse(node.targets[0])
    return name if ALIAS.fullmatch(name) else None


def function_findings(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[Finding]:
    """Yield the rules that the name of a function breaks."""
    name = function.name.strip("_")
    returns = function.returns
    broken = {
        "participle": bool(PARTICIPLE.fullmatch(name)),
        "preposition": bool(PREPOSITION.match(name)),
        "one word": "_" not in name,
        "predicate without an answer": bool(PREDICATE.match(name))
        and isinstance(returns, ast.Constant)
        and returns.value is None,
    }
    for rule, breaks in broken.items():
        if breaks:
            yield Finding(rule, function.name, function.lineno)


def unknown_arguments(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[Finding]:
    """Yield the names under "Args:" of a docstring that are no parameters."""
    _, _, manual = (ast.get_docstring(function) or "").partition("Args:")
    section = re.split(r"\n(?=\S)", manual)[0]
    parameters = {node.arg for node in ast.walk(function.args) if isinstance(node, ast.arg)}
    for names in DOCUMENTED.findall(section):
        for name in set(names.split(", ")) - parameters:
            yield Finding("argument without a parameter", name, function.lineno)


def read_file(path: Path) -> tuple[Counts, list[Finding], dict[str, int]]:
    """Return the totals of a file, its findings, and the lines of its public classes by name."""
    text = path.read_text(encoding="utf-8")
    findings: list[Finding] = []
    classes: dict[str, int] = {}
    bindings = functions = 0
    for node in ast.walk(ast.parse(text)):
        name = binding(node)
        if name is not None:
            bindings += 1
            if name in VAGUE:
                findings.append(Finding("vague binding", name, getattr(node, "lineno", 0)))
        elif name := type_name(node):
            classes[name] = getattr(node, "lineno", 0)
        elif is_plain_function(node):
            functions += 1
            findings += function_findings(node)
            findings += unknown_arguments(node)
    lines = text.splitlines()
    if path.stem != UNTYPED_HOME:
        for index, line in enumerate(lines, 1):
            findings += [
                Finding("untyped document", match, index) for match in UNTYPED.findall(line)
            ]
    return Counts(bindings, functions, len(lines)), findings, classes


def rates(counts: Counts, findings: list[Finding]) -> list[float]:
    """Return the rate of each rule, in the order of LIMITS."""
    return [
        limit.scale
        * sum(finding.rule == limit.rule for finding in findings)
        / max(getattr(counts, limit.total), 1)
        for limit in LIMITS
    ]


def main() -> int:
    """Print the table, and return 1 if a limit is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", default="ortlaunch", type=Path)
    parser.add_argument("--list", nargs="+", default=(), type=str, metavar="PATH")
    options = parser.parse_args()
    totals: dict[str, Counts] = defaultdict(Counts)
    findings: dict[str, list[Finding]] = defaultdict(list)
    classes: dict[str, list[str]] = defaultdict(list)
    for path in sorted(options.folder.rglob("*.py")):
        counts, file_findings, file_classes = read_file(path)
        parts = path.relative_to(options.folder).parts
        for package in (parts[0] if len(parts) > 1 else ".", "all"):
            totals[package] = Counts(*(sum(pair) for pair in zip(totals[package], counts)))
            findings[package] += file_findings
        for name, line in file_classes.items():
            classes[name].append(f"{path}:{line}")
        if any(path.is_relative_to(listed) for listed in options.list):
            for finding in sorted(file_findings, key=lambda finding: finding.line):
                print(f"{path}:{finding.line}: {finding.rule}: {finding.name}")
    print(f"{'':14s}" + "".join(f"{limit.rule[:16]:>18s}" for limit in LIMITS))
    for package in sorted(totals):
        row = rates(totals[package], findings[package])
        print(f"{package:14s}" + "".join(f"{rate:18.1f}" for rate in row))
    print(f"{'limit':14s}" + "".join(f"{limit.most:18.1f}" for limit in LIMITS))
    exceeded = [
        f"{limit.rule}: {rate:.1f} of {limit.scale} {limit.total}, the limit is {limit.most}"
        for limit, rate in zip(LIMITS, rates(totals["all"], findings["all"]))
        if rate > limit.most
    ]
    exceeded += [
        f"class {name} is defined twice: {', '.join(places)}"
        for name, places in sorted(classes.items())
        if len(places) > 1
    ]
    print(*exceeded, sep="\n", file=sys.stderr)
    return 1 if exceeded else 0


if __name__ == "__main__":
    raise SystemExit(main())
