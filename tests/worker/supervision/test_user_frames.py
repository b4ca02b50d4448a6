"""The line of the user's own files that raised an error, and a traceback of their frames alone."""

from __future__ import annotations

import importlib.util
import json
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from ortlaunch.diagnose.conclude import conclude_run
from ortlaunch.run_folder.folder import RunDir, write_text_atomically
from ortlaunch.worker.supervision.user_frames import (
    error_type_message_and_location,
    last_user_source_location_or_none,
    traceback_with_foreign_frames_counted,
)
from tests.worker.guarded import guarded, write_plan

# Line numbers below refer to this text.
SOURCE = """\
import json


def lookup(table):
    return table["lookup"]


def library():
    return json.loads("{")


def wrapped():
    try:
        lookup({})
    except KeyError as error:
        raise ValueError("no entry") from error


def empty():
    assert False
"""


@pytest.fixture
def raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Exception]:
    """Return a function that returns the exception of a function of the user's module."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "crash_model.py"
    path.write_text(SOURCE)
    spec = importlib.util.spec_from_file_location("crash_model", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def call(name: str) -> Exception:
        with pytest.raises(Exception) as found:  # noqa: PT011
            getattr(module, name)({}) if name == "lookup" else getattr(module, name)()
        return found.value

    return call


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("lookup", "KeyError: 'lookup', at crash_model.py:5"),
        ("library", "JSONDecodeError: Expecting property name enclosed in double quotes: line 1 column 2 (char 1), "
                    "at crash_model.py:9"),
        ("wrapped", "ValueError: no entry, at crash_model.py:16"),
        ("empty", "AssertionError in crash_model.py, empty: assert False, at crash_model.py:20"),
    ],
)  # fmt: skip
def test_the_line_is_in_the_users_file(
    name: str, expected: str, raised: Callable[[str], Exception]
) -> None:
    """The line is the last frame in the user's file, also of a library's error."""
    assert error_type_message_and_location(raised(name)) == expected


def test_an_error_outside_the_users_files_has_no_line() -> None:
    """An error outside the user's files has no line of theirs."""
    with pytest.raises(json.JSONDecodeError) as found:
        json.loads("{")
    # The first frame is that of this test.
    found.value.__traceback__ = (
        found.value.__traceback__.tb_next if found.value.__traceback__ else None
    )
    assert last_user_source_location_or_none(found.value) is None


def test_frames_of_packages_are_counted(raised: Callable[[str], Exception]) -> None:
    """Frames of packages are only counted; the user's have their source line."""
    error = raised("library")
    text = traceback_with_foreign_frames_counted("".join(traceback.format_exception(error)))
    assert (
        "  ... 3 frames of ortlaunch and of packages\njson.decoder.JSONDecodeError: Expecting"
        in text
    )
    assert 'crash_model.py", line 9, in library\n    return json.loads("{")\n' in text
    assert "decoder.py" not in text


def test_the_verdict_names_the_users_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The terminal shows the user's frames alone, and the log the whole traceback."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "crash_model.py").write_text(SOURCE)
    run = RunDir(Path("run"))
    write_plan(run, "local")
    write_text_atomically(run.request, "")
    load = (
        "import importlib.util as u; s = u.spec_from_file_location('c', 'crash_model.py'); "
        "m = u.module_from_spec(s)"
    )
    guarded(run, f"{load}; s.loader.exec_module(m); m.library()")
    text = conclude_run(run, 1).render()
    assert "(char 1), at crash_model.py:9\n" in text
    assert "decoder.py" not in text
    assert "decoder.py" in run.rank_log_path(1, "err").read_text()
