"""Causes of failure are data: one module renders them, and no other module parses the text."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ortlaunch.base.cause import Cause, Failure
from ortlaunch.run_folder import cause_text
from ortlaunch.run_folder.cause_text import (
    advice_for_failure,
    command_end_sentence,
    diagnosis_verdict_line,
)
from ortlaunch.run_folder.library_messages import (
    is_lost_peer_message,
    match_cause_in_text,
    native_crash_cause_and_detail,
)
from ortlaunch.run_folder.records import record_from_json_values

PACKAGE = Path(__file__).parents[2] / "ortlaunch"
RENDERED_BY = PACKAGE / "run_folder" / "cause_text.py"
# Modules that read messages of other programs: of libraries, and of `mpirun --version`.
OF_OTHERS = (
    PACKAGE / "run_folder" / "library_messages.py",
    PACKAGE / "launch" / "mpi.py",
)
# Packages that find out how a run ended.
READERS = ("diagnose", "run", "started_runs", "run_folder", "launch", "bench", "api", "report", "schedulers",
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
    """Yield a failure of each cause, of a rank and of the command, with all fields and with few."""
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
    """Return every sentence, verdict and advice of all causes."""
    return {
        text
        for each in failures()
        for text in (
            command_end_sentence(each),
            diagnosis_verdict_line(each),
            *advice_for_failure(each),
        )
    }


@functools.cache
def read_texts(path: Path) -> tuple[tuple[int, str, bool], ...]:
    """Return each literal that a module searches for in a text.

    Returns:
        The line, the literal, and whether it is a regular expression.
    """
    return tuple(_read_texts(path))


def _read_texts(path: Path) -> Iterator[tuple[int, str, bool]]:
    for node in nodes_of(path):
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
    """Return the string constants of an expression, including the parts of f-strings."""
    return (
        each.value
        for each in ast.walk(node)
        if isinstance(each, ast.Constant) and isinstance(each.value, str)
    )


def found_in(text: str, is_pattern: bool, messages: set[str]) -> str | None:
    """Return a message that contains the text or matches the pattern, or None."""
    return next(
        (each for each in messages if (re.search(text, each) if is_pattern else text in each)), None
    )


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    """Return the nodes of a module's syntax tree; cached because they are read several times."""
    return [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))]


def messages() -> dict[str, set[str]]:
    """Return the texts of several words by module, without docstrings and searched literals."""
    found: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        nodes = nodes_of(path)
        docs = {id(each.value) for each in nodes if isinstance(each, ast.Expr)}
        read = {text for _, text, _ in read_texts(path)}
        texts = (each for each in nodes if isinstance(each, ast.Constant) and id(each) not in docs)
        found[str(path)] = {
            each.value for each in texts
            if isinstance(each.value, str) and " " in each.value.strip() and each.value not in read
        }  # fmt: skip
    return found


def modules() -> list[Path]:
    """Return the modules of READERS that must not parse rendered sentences."""
    found = [path for room in READERS for path in sorted((PACKAGE / room).rglob("*.py"))]
    return [path for path in found if path not in (RENDERED_BY, *OF_OTHERS)]


def test_every_cause_has_words() -> None:
    """Every cause has a sentence and a verdict, and all placeholders are filled in."""
    for each in failures():
        assert command_end_sentence(each).strip()
        assert diagnosis_verdict_line(each).strip()
        assert "{" not in command_end_sentence(each) + diagnosis_verdict_line(each)


# Causes whose detail, or the traceback before it, says what to do.
WITHOUT_ADVICE = {
    Cause.ENDED_WELL,
    Cause.OUTLIVED,
    Cause.GRADIENT_NOT_FINITE,
    Cause.DAMAGED_CHECKPOINT,
    Cause.BAD_INPUT,
    Cause.RAISED,
    Cause.LAUNCHER_FAILED,
    Cause.UNKNOWN,
}


def test_every_cause_has_advice_or_needs_none() -> None:
    """A new cause gets its advice in cause_text.py, or a place in WITHOUT_ADVICE."""
    assert {cause for cause in Cause if not advice_for_failure(Failure(cause))} == WITHOUT_ADVICE


def test_a_cause_of_another_version_is_unknown() -> None:
    """A record of a later version can be read; its unknown causes become UNKNOWN."""
    assert Cause("a later one") is Cause.UNKNOWN
    assert record_from_json_values(
        Failure, {"cause": Cause.CRASH, "signal": 11, "later": 1}
    ) == Failure(Cause.CRASH, signal=11)


def test_nobody_matches_a_rendered_sentence() -> None:
    """No decision depends on a sentence of cause_text.py."""
    texts = rendered()
    wrong = []
    for path in modules():
        for line, text, is_pattern in read_texts(path):
            # Single words are skipped: they occur in sentences by chance.
            if " " in text.strip() and (said := found_in(text, is_pattern, texts)):
                wrong.append(f"{path}:{line}: {text!r} matches {said!r}")
    assert not wrong, "\n".join(wrong)


def test_nobody_looks_for_a_prefix_of_the_command() -> None:
    """The prefixes of printed lines are written by one module, and looked for by none."""
    wrong = [
        f"{path}:{each.lineno}"
        for path in PACKAGE.rglob("*.py")
        for node in nodes_of(path)
        if isinstance(node, (ast.Call, ast.Compare))
        for each in ast.walk(node)
        if isinstance(each, ast.Name)
        and each.id.endswith("_PREFIX")
        and each.id in vars(cause_text)
        and path != RENDERED_BY.with_name("verdict.py")
    ]
    assert not wrong, wrong


def test_nobody_matches_another_modules_message() -> None:
    """No module searches for a text of two words that is in a message of another module."""
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
    """A message of a library gives the cause and the line that shows it."""
    found = match_cause_in_text(text)
    assert found is not None
    assert (found[0], found[1].startswith(line)) == (cause, True)


@pytest.mark.parametrize(
    ("frame", "expected"),
    [
        ("x/_execution_agent.py", (Cause.GRAPH_CRASH, "what(): y; in its backward pass")),
        ("net.py", (Cause.CRASH, "what(): y; called by run_backward at net.py:9")),
    ],
)
def test_the_stack_of_a_crash_tells_whose_it_is(frame: str, expected: tuple[Cause, str]) -> None:
    """The innermost frame of Python's fault handler is ONNX Runtime's, or that of other code."""
    log = (
        "what(): y\nFatal Python error: Segmentation fault\n\nCurrent thread 0x1 (most recent call "
        f'first):\n  File "{frame}", line 9 in run_backward\n  File "loop.py", line 3 in main\n'
    )
    assert native_crash_cause_and_detail(log) == expected
    assert native_crash_cause_and_detail("nothing") == (Cause.CRASH, "")


def test_other_messages_tell_no_cause() -> None:
    """The user's own exception gives no cause; a closed connection means a lost peer."""
    assert match_cause_in_text("ValueError: planted") is None
    assert is_lost_peer_message("RuntimeError: [../gloo/x] Connection closed by peer")
    assert not is_lost_peer_message("ValueError: planted")
