"""The notebooks of docs/ run from their first cell to the last."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.runs import environment
from tests.ort import INSTALLED

DOCS = Path(__file__).parents[2] / "docs" / "start"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["finetuning", pytest.param("engines", marks=pytest.mark.ci)])
def test_a_notebook(name: str, home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every cell of the notebook runs, and stored outputs are not committed."""
    execution: Any = pytest.importorskip("nbclient")
    books: Any = pytest.importorskip("nbformat")
    for variable, value in environment(home).items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setenv("PYTHONPATH", str(DOCS.parent))
    book = books.read(DOCS / f"notebook-{name}.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in book.cells)
    # The kernel of this environment, which is the Python of these tests.
    client = execution.NotebookClient(
        book, timeout=500, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    if name == "engines" and INSTALLED:
        assert "my-net" in book.cells[-1].outputs[0]["text"]
        assert "'ort'" in book.cells[-1].outputs[0]["text"]
