"""Writes data/docstrings-train.jsonl and data/docstrings-evaluation.jsonl: docstrings of Python's own library, each
with the package that it is from. Takes a second, and nothing but Python."""

import ast
import json
import random
import sysconfig
from pathlib import Path

PACKAGES = (
    "asyncio",
    "email",
    "http",
    "importlib",
    "logging",
    "multiprocessing",
    "unittest",
    "xml",
)


def docstrings(folder):
    """Those of 40 characters or more in a package's files, none twice."""
    documented, found = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef), {}
    for file in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            text = ast.get_docstring(node) if isinstance(node, documented) else None
            if text and len(text) >= 40:
                found[text] = None
    return list(found)


def main():
    library = Path(sysconfig.get_paths()["stdlib"])
    rows = [
        {"text": text, "label": package}
        for package in PACKAGES
        for text in docstrings(library / package)
    ]
    random.Random(0).shuffle(rows)
    held_out = len(rows) // 8
    Path("data").mkdir(exist_ok=True)
    for name, part in (("evaluation", rows[:held_out]), ("train", rows[held_out:])):
        path = Path("data", f"docstrings-{name}.jsonl")
        path.write_text("".join(f"{json.dumps(row)}\n" for row in part), encoding="utf-8")
        print(f"{path}: {len(part)} rows")


if __name__ == "__main__":
    main()
