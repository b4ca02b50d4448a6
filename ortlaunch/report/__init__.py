"""`ortlaunch report`: one HTML page about runs, made from their folders; it needs no network."""

from __future__ import annotations

import base64
import functools
import hashlib
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ortlaunch.base.errors import InputError
from ortlaunch.base.units import human_bytes
from ortlaunch.report.records import Record, read_run_records_or_refuse
from ortlaunch.report.sections import report_page_values
from ortlaunch.report.tables import formatted_cell_value
from ortlaunch.run_folder.folder import RunDir, write_text_atomically
from ortlaunch.search.parallel import Picture
from ortlaunch.version import __version__

# The first line of every report: it marks a file that may be overwritten.
_FIRST_LINE = "<!DOCTYPE html><!-- ortlaunch report -->\n"


def write_report_page(
    run_folders: Sequence[Path],
    requested_path: Path | None,
    creation_time_text: str,
    sweep_picture: Picture | None = None,
) -> Path:
    """Write the page, and return its path.

    Args: runs: folders of the runs to compare, one column each. to: the page's path; None:
    report.html in the run's folder, or in the current folder for several runs. now: the current
    time, as the page shows it. sweep: the picture of the runs' sweep; None: they are of none.

    Raises: InputError: a folder is not a run's, or the page's path has a file that is no report.
    """
    page_path = requested_path or RunDir(run_folders[0] if len(run_folders) == 1 else Path()).report
    records = read_run_records_or_refuse(run_folders)
    if page_path.is_dir() or (page_path.exists() and not _is_report(page_path)):
        raise InputError(
            f"{page_path} exists already and is not a report; give another file with --to"
        )
    write_text_atomically(page_path, report_page_html(records, creation_time_text, sweep_picture))
    return page_path


def report_page_html(
    run_records: Sequence[Record], creation_time_text: str, sweep_picture: Picture | None = None
) -> str:
    """Return the page as text."""
    return (
        _page_environment()
        .get_template("page.html")
        .render(report_page_values(run_records), now=creation_time_text, sweep=sweep_picture)
    )


def bench_page_html(
    title: str, chart: dict[str, object], table_text: str, creation_time_text: str
) -> str:
    """Return the page of a bench: its bar chart and its table."""
    return (
        _page_environment()
        .get_template("bench.html")
        .render(title=title, chart=chart, table=table_text, now=creation_time_text)
    )


@functools.cache
def _page_environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("ortlaunch", "report"),
        # Recipes and errors contain text of users and of other programs.
        autoescape=True,
        finalize=_text_with_control_characters_escaped,
        trim_blocks=True,
        lstrip_blocks=True,
        # A misspelt name in a template raises instead of leaving a blank.
        undefined=StrictUndefined,
    )
    environment.filters.update(cell=formatted_cell_value, human=human_bytes)
    script = (Path(__file__).parent / "charts.js").read_text(encoding="utf-8")
    script_hash = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    environment.globals.update(version=__version__, script=Markup(script), script_hash=script_hash)
    return environment


def _text_with_control_characters_escaped(value: object) -> object:
    """Return text with its control characters as Python escapes, because no page shows them.

    jinja2 calls this for every value before it escapes HTML.
    """
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    return "".join(
        character if character.isprintable() or character in "\n\t" else repr(character)[1:-1]
        for character in value
    )


def _is_report(page_path: Path) -> bool:
    with page_path.open(encoding="utf-8", errors="replace") as file:
        return file.readline() == _FIRST_LINE
