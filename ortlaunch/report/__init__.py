"""`ortlaunch report`: one HTML page about runs, made from their folders; it needs no network."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from ortlaunch.errors import InputError
from ortlaunch.report.curves import AREA
from ortlaunch.report.records import Record, read
from ortlaunch.report.sections import content
from ortlaunch.report.tables import cell
from ortlaunch.run_folder.folder import RunDir, write_text_atomically
from ortlaunch.search.parallel import Picture
from ortlaunch.units import human_bytes
from ortlaunch.version import __version__

# The first line of every report: it marks a file that may be overwritten.
_FIRST = "<!DOCTYPE html><!-- ortlaunch report -->\n"


def report(runs: Sequence[Path], to: Path | None, now: str, sweep: Picture | None = None) -> Path:
    """Write the page, and return its path.

    Args: runs: folders of the runs to compare, one column each. to: the page's path; None:
    report.html in the run's folder, or in the current folder for several runs. now: the current
    time, as the page shows it. sweep: the picture of the runs' sweep; None: they are of none.

    Raises: InputError: a folder is not a run's, or the page's path has a file that is no report.
    """
    target = to or RunDir(runs[0] if len(runs) == 1 else Path()).report
    records = read(runs)
    if target.is_dir() or (target.exists() and not _is_ours(target)):
        raise InputError(
            f"{target} exists already and is not a report; give another file with --to"
        )
    write_text_atomically(target, page(records, now, sweep))
    return target


def page(records: Sequence[Record], now: str, sweep: Picture | None = None) -> str:
    """Return the page as text."""
    return _template().render(content(records), **AREA, version=__version__, now=now, sweep=sweep)


@functools.cache
def _template() -> Template:
    pages = Environment(
        loader=PackageLoader("ortlaunch", "report"),
        # Recipes and errors contain text of users and of other programs.
        autoescape=True,
        finalize=_visible,
        trim_blocks=True,
        lstrip_blocks=True,
        # A misspelt name in page.html raises instead of leaving a blank.
        undefined=StrictUndefined,
    )
    pages.filters.update(cell=cell, human=human_bytes)
    return pages.get_template("page.html")


def _visible(value: object) -> object:
    """Return text with its control characters as Python escapes, because no page shows them.

    jinja2 calls this for every value before it escapes HTML.
    """
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in value)


def _is_ours(path: Path) -> bool:
    with path.open(encoding="utf-8", errors="replace") as file:
        return file.readline() == _FIRST
