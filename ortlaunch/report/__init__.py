"""`ortlaunch report`: runs as one HTML page that needs no network, made of their folders alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ortlaunch import __version__
from ortlaunch.errors import InputError
from ortlaunch.report.curves import swatch
from ortlaunch.report.markup import Html, tag
from ortlaunch.report.records import Record, read
from ortlaunch.report.sections import sections
from ortlaunch.report.style import STYLE
from ortlaunch.run.folder import write_text

_FIRST = "<!DOCTYPE html><!-- ortlaunch report -->\n"
# Nothing is loaded and no script runs, whatever a run's texts hold.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def report(runs: Sequence[Path], to: Path | None, now: str) -> Path:
    """Write the page; returns where: report.html in the run's folder, or in the current one for several runs.

    Raises:
        InputError: a folder is none of a run's, or there is another file in the page's place.
    """
    target = to or (runs[0] if len(runs) == 1 else Path()) / "report.html"
    records = read(runs)
    if target.is_dir() or (target.exists() and not _is_ours(target)):
        raise InputError(f"{target} is there already and no report; give another file with --to")
    write_text(target, page(records, now))
    return target


def page(records: Sequence[Record], now: str) -> str:
    """The page as text."""
    names = ", ".join(record.label for record in records)
    head = [
        Html('<meta charset="utf-8"/><meta name="viewport" content="width=device-width,initial-scale=1"/>'),
        Html(f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}"/>'),
        tag("title", f"{names}: ortlaunch"),
        tag("style", Html(STYLE)),
    ]
    said = tag("p", f"Made by ortlaunch {__version__} at {now} from the run folders alone.", class_="soft")
    parts = [(tag("h2", name), body) for name, body in sections(records) if body is not None]
    body = tag("main", tag("h1", names), said, _legend(records), *(piece for part in parts for piece in part))
    return _FIRST + tag("html", tag("head", *head), tag("body", body), lang="en") + "\n"


def _legend(records: Sequence[Record]) -> Html | None:
    """Which line is which run's."""
    if len(records) == 1:
        return None
    named = [tag("span", swatch(at), record.label) for at, record in enumerate(records)]
    return tag("div", *named, class_="legend")


def _is_ours(path: Path) -> bool:
    with path.open(encoding="utf-8", errors="replace") as file:
        return file.readline() == _FIRST
