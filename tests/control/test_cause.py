"""Causes of failure are data: each is rendered in one module, and no other module of ours reads the sentences."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ortlaunch.cause import Cause, Failure
from ortlaunch.run_folder.cause_text import advice, sentence, verdict
from ortlaunch.run_folder.library_messages import cause_in, lost_a_peer

PACKAGE = Path(__file__).parents[2] / "ortlaunch"
RENDERED_BY = PACKAGE / "run_folder" / "cause_text.py"
OF_OTHERS = (
    PACKAGE / "run_folder" / "library_messages.py",
    PACKAGE / "launch" / "mpi.py",
)  # mpirun --version
READERS = ("diagnose", "run", "runs", "run_folder", "launch", "bench", "commands", "report", "schedulers",
           "worker/supervision")  # fmt: skip
# Methods that look for their first argument in a text; functions of re have a pattern there.
_METHODS = (
    "startswith",
    "endswith",
    "partition",
    "rpartition",
    "removeprefix",
    "removesuffix",
    "find",
    "index",
)
_PATTERNS = ("compile", "search", "match", "fullmatch", "sub", "split", "findall", "finditer")


def failures() -> Iterator[Failure]:
    """Each cause, of a rank and of the command, with all fields and with few."""
    for cause in Cause:
        full = Failure(cause, "DETAIL", 1, "HOST", "WHO", 9, 7, 3, 2, 2, "FILE:1")
        of_command = replace(full, rank=None, memory_kills=None)
        yield from (
            full,
            of_command,
            replace(of_command, began=0, memory_kills=0),
            replace(of_command, who=""),
        )
        yield from (replace(full, signal=11, memory_kills=None), Failure(cause, "DETAIL"))


def rendered() -> set[str]:
    """Every sentence that a cause has."""
    return {text for each in failures() for text in (sentence(each), verdict(each), *advice(each))}


def read_texts(path: Path) -> Iterator[tuple[int, str, bool]]:
    """(line, text, whether it is a pattern) of each literal with which a module looks into a text."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            of_re = isinstance(node.func.value, ast.Name) and node.func.value.id == "re"
            if of_re and node.func.attr in _PATTERNS:
                yield from ((node.lineno, text, True) for text in literals(node.args[0]))
            elif node.func.attr in _METHODS:
                yield from ((node.lineno, text, False) for text in literals(node.args[0]))
        if isinstance(node, ast.Compare) and any(
            isinstance(each, (ast.In, ast.NotIn)) for each in node.ops
        ):
            yield from ((node.lineno, text, False) for text in literals(node.left))


def literals(node: ast.expr) -> Iterator[str]:
    """Texts of an expression; of an f-string its parts."""
    return (
        each.value
        for each in ast.walk(node)
        if isinstance(each, ast.Constant) and isinstance(each.value, str)
    )


def found_in(text: str, is_pattern: bool, messages: set[str]) -> str | None:
    """A message that the text or pattern is in."""
    return next(
        (each for each in messages if (re.search(text, each) if is_pattern else text in each)), None
    )


@functools.cache
def tree_of(path: Path) -> ast.Module:
    """A module's syntax tree."""
    return ast.parse(path.read_text(encoding="utf-8"))


def messages() -> dict[str, set[str]]:
    """Texts of more than one word in each module, docstrings and what looks into a text apart."""
    found: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        tree = tree_of(path)
        docs = {id(each.value) for each in ast.walk(tree) if isinstance(each, ast.Expr)}
        read = {text for _, text, _ in read_texts(path)}
        texts = (
            each
            for each in ast.walk(tree)
            if isinstance(each, ast.Constant) and id(each) not in docs
        )
        found[str(path)] = {
            each.value for each in texts
            if isinstance(each.value, str) and " " in each.value.strip() and each.value not in read
        }  # fmt: skip
    return found


def modules() -> list[Path]:
    """Those that learn how a run ended."""
    found = [path for room in READERS for path in sorted((PACKAGE / room).rglob("*.py"))]
    return [path for path in found if path not in (RENDERED_BY, *OF_OTHERS)]


def test_every_cause_has_words() -> None:
    """A sentence and a verdict, without a field that nobody filled in."""
    for each in failures():
        assert sentence(each).strip()
        assert verdict(each).strip()
        assert "{" not in sentence(each) + verdict(each)


def test_a_cause_of_another_version_is_unknown() -> None:
    """A record of a later version is read."""
    assert Cause("a later one") is Cause.UNKNOWN
    assert Failure.from_json({"cause": "crash", "signal": 11, "later": 1}) == Failure(
        Cause.CRASH, signal=11
    )


def test_nobody_matches_a_rendered_sentence() -> None:
    """Renaming a sentence of cause_text.py can change nobody's decision."""
    texts = rendered()
    wrong = []
    for path in modules():
        for line, text, is_pattern in read_texts(path):
            if " " in text.strip() and (said := found_in(text, is_pattern, texts)):
                wrong.append(f"{path}:{line}: {text!r} matches {said!r}")
    assert not wrong, "\n".join(wrong)


def test_nobody_matches_another_modules_message() -> None:
    """A text of two words that a module looks for is in no message of another module of ours."""
    said = messages()
    wrong = []
    for path in modules():
        for line, text, is_pattern in read_texts(path):
            others = said.items() if " " in text.strip() else ()
            hits = (
                (other, found_in(text, is_pattern, texts))
                for other, texts in others
                if other != str(path)
            )
            wrong += [
                f"{path}:{line}: {text!r} is in {other}: {hit!r}" for other, hit in hits if hit
            ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("text", "cause", "line"),
    [
        (
            "T\nRuntimeError: DefaultCPUAllocator: can't allocate memory",
            Cause.OUT_OF_MEMORY,
            "RuntimeError: Default",
        ),
        (
            "x\ntorch.OutOfMemoryError: CUDA out of memory. Tried 2 GiB",
            Cause.OUT_OF_MEMORY,
            "torch.OutOfMemoryError",
        ),
        (
            "RuntimeException: Failed to allocate memory for requested buffer",
            Cause.OUT_OF_MEMORY,
            "RuntimeException",
        ),
        (
            "terminate called after throwing an instance of 'std::bad_alloc'",
            Cause.OUT_OF_MEMORY,
            "terminate called",
        ),
        ("MemoryError", Cause.OUT_OF_MEMORY, "MemoryError"),
        ("OSError: [Errno 28] No space left on device: 'x'", Cause.DISK_FULL, "OSError"),
        ("OSError: [Errno 98] Address already in use", Cause.PORT_TAKEN, "OSError"),
        (
            "T\n  x\nIndexError: Target 7 is out of bounds.\n",
            Cause.INDEX_OUT_OF_RANGE,
            "IndexError: Target 7",
        ),
        (
            "ModuleNotFoundError: No module named 'nowhere'",
            Cause.MISSING_MODULE,
            "ModuleNotFoundError",
        ),
        (
            "FileNotFoundError: [Errno 2] No such file: 'a.bin'",
            Cause.MISSING_FILE,
            "FileNotFoundError",
        ),
        (
            "PermissionError: [Errno 13] Permission denied: 'b'",
            Cause.UNREADABLE_FILE,
            "PermissionError",
        ),
        ("torch.DistStoreError: No locks available", Cause.NO_LOCKS, "torch.DistStoreError"),
    ],
)
def test_messages_of_libraries(text: str, cause: Cause, line: str) -> None:
    """The cause, and the line that shows it."""
    found = cause_in(text)
    assert found is not None
    assert (found[0], found[1].startswith(line)) == (cause, True)


def test_other_messages_tell_no_cause() -> None:
    """An exception of the user's own; that of a rank whose peer has gone is an echo."""
    assert cause_in("ValueError: planted") is None
    assert lost_a_peer("RuntimeError: [../gloo/x] Connection closed by peer")
    assert not lost_a_peer("ValueError: planted")
