"""Writes data/summaries-*.jsonl and data/questions-*.jsonl from the docstrings of Python's own library: a docstring
with its first line as summary, and three functions with a question about one. Takes seconds, and nothing but Python."""

import ast
import json
import random
import sysconfig
from pathlib import Path


def first_lines_and_rests(library):
    """Name, first line and rest of the docstrings of the library's files."""
    for file in sorted(library.glob("*.py")) + sorted(library.glob("*/*.py")):
        if {"test", "tests", "site-packages", "idlelib"} & {*file.parts}:
            continue
        try:
            tree = ast.parse(file.read_text(encoding="utf-8"))
        # A file with faults on purpose.
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                first, _, rest = (ast.get_docstring(node) or "").partition("\n")
                if 20 <= len(first) <= 80 and first.endswith("."):
                    yield node.name, first, " ".join(rest.split())[:400]


def question(lines, chance):
    """A question about one of three functions, whose first lines are the context."""
    chosen = chance.sample(lines, 3)
    context = "".join(f"{name}: {first} " for name, first, _ in chosen)
    name, first, _ = chance.choice(chosen)
    return {
        "question": f"What is {name}?",
        "context": context,
        "answers": {
            "text": [first],
            "answer_start": [context.index(f"{name}: {first}") + len(name) + 2],
        },
    }


def main():
    chance = random.Random(0)
    lines = list({first: (name, first, rest) for name, first, rest in
                  first_lines_and_rests(Path(sysconfig.get_paths()["stdlib"]))}.values())  # fmt: skip
    summaries = [{"text": rest, "target": first} for _, first, rest in lines if len(rest) > 40]
    chance.shuffle(summaries)
    Path("data").mkdir(exist_ok=True)
    for name, rows in (
        ("summaries", summaries),
        ("questions", [question(lines, chance) for _ in range(3000)]),
    ):
        held_out = len(rows) // 8
        for part, part_rows in (("evaluation", rows[:held_out]), ("train", rows[held_out:])):
            path = Path("data", f"{name}-{part}.jsonl")
            path.write_text("".join(f"{json.dumps(row)}\n" for row in part_rows), encoding="utf-8")
            print(f"{path}: {len(part_rows)} rows")


if __name__ == "__main__":
    main()
