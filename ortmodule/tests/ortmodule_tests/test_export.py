"""`python -m ortmodule.export`: the repairs by phase, how they ran for a model, and the page's table."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from ortmodule import export
from ortmodule._internal.base.repair_registry import PHASES, repairs_in_order
from ortmodule_tests.forks import Run
from ortmodule_tests.ort import needs_ort

PAGE = Path(__file__).parents[2] / "docs" / "repairs.md"
FACTORY = """
import torch

def frozen():
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    net[0].requires_grad_(False)
    return net, torch.ones(3, 4)

def nothing():
    pass
"""


def test_the_page_has_every_repair() -> None:
    """docs/repairs.md has each repair with its phases and its fault; UPDATE_GOLDEN=1 writes them."""
    rows = [
        f"| `{r.name}` | {', '.join(sorted(r.order_by_phase, key=PHASES.index))} | {r.fault} |\n"
        for r in repairs_in_order()
    ]
    head, line, rest = PAGE.read_text(encoding="utf-8").partition("\n|---|---|---|\n")
    table, _, after = rest.partition("\n\n")
    if os.environ.get("UPDATE_GOLDEN"):
        PAGE.write_text(head + line + "".join(rows) + "\n" + after, encoding="utf-8")
    else:
        assert f"{table}\n" == "".join(rows)


@needs_ort
def test_repairs_are_printed_with_what_they_did(
    built: None, tmp_path: Path, fresh_ort: Run
) -> None:
    """Each phase has its repairs in order; those of a model's export have an outcome."""
    (tmp_path / "given.py").write_text(FACTORY)
    # In a process of its own, for it changes the registry.
    done = fresh_ort(
        f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\n"
        "from ortmodule.export import main\nsys.exit(main(sys.argv[1:]))",
        "given:frozen",
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if not line.startswith(" " * 8)]
    phases = [line for line in lines if not line.startswith(" ")]
    assert phases[:3] == ["before import:", "after import:", "install:"]
    passes = lines[lines.index("graph pass:") + 1 : lines.index("gradient selection:")]
    assert passes[:2] == [
        "    keep_buffers_exact: applied; changed the graph",
        "    skip_ignored_labels: applied; left the graph as it was",
    ]
    assert "    skip_frozen_gradients: applied; left out 2 of 6 gradients" in lines
    assert "    detect_kept_tensors: applied; ran" in lines
    assert "    load_cuda_libraries: not needed with the installed versions" in lines


@needs_ort
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mark"], "'--mark': wrong arguments"),
        (["given"], "'given': module 'given' has no attribute ''; it must be module:factory"),
        (["given:nothing"], "'given:nothing': cannot unpack"),
        (["missing:frozen"], "'missing:frozen': No module named 'missing'; it must be"),
    ],
)
def test_wrong_arguments_are_named(
    arguments: list[str],
    message: str,
    built: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The message has the argument, what is wrong, and the right form; the status is 2."""
    (tmp_path / "given.py").write_text(FACTORY)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "given", raising=False)
    assert export.main(arguments) == 2
    assert capsys.readouterr().err.startswith(message)
