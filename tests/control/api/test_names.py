"""Tests of the public names: what `import ortlaunch` loads, and what the documentation imports."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ortlaunch
from ortlaunch import api

ROOT = Path(__file__).parents[3]
# Modules that are public as a whole.
MODULES = ("ortlaunch.base.errors",)
# Names of the standard library's modules that an import of ours must not add, and heavy packages.
LIGHT = """
import sys
before = set(sys.modules)
import ortlaunch
added = set(sys.modules) - before
assert added == {"ortlaunch", "ortlaunch.version"}, added
assert ortlaunch.__version__ and ortlaunch.load and ortlaunch.Run
assert not {"torch", "transformers", "onnxruntime", "numpy", "pandas", "tqdm"} & set(sys.modules)
"""


def test_the_import_is_light() -> None:
    """`import ortlaunch` loads two modules, and the API neither torch nor pandas."""
    subprocess.run([sys.executable, "-c", LIGHT], check=True, timeout=60)


def test_every_name_exists() -> None:
    """Every public name is importable, and no module of the package has a name of a function."""
    assert sorted(ortlaunch.__all__) == sorted(dir(ortlaunch))
    assert all(getattr(ortlaunch, name) is not None for name in ortlaunch.__all__)
    # An import of such a module would replace the function.
    modules = {path.stem for path in Path(api.__file__).parents[1].iterdir()}
    assert modules & set(ortlaunch.__all__) == set()
    with pytest.raises(AttributeError, match="no attribute 'tarin'"):
        _ = getattr(ortlaunch, "tarin")  # noqa: B009


@pytest.mark.parametrize(
    "page",
    [*sorted((ROOT / "docs").glob("*/*.md")), ROOT / "README.md"],
    ids=lambda page: page.name,
)
def test_the_documentation_imports_public_names(page: Path) -> None:
    """Examples import nothing but public names."""
    assert [name for name in imported(page.read_text()) if not is_public(name)] == []


def test_a_private_name_is_found() -> None:
    """The test above reads blocks of Python and lines of text."""
    text = "```python\nfrom ortlaunch.run import control\nimport ortlaunch\n```\n"
    assert list(imported(text)) == ["ortlaunch.run.control", "ortlaunch"]
    assert not is_public("ortlaunch.run.control")


def imported(text: str) -> list[str]:
    """Return the names of ortlaunch that a page imports, module and name joined by a dot."""
    lines = re.findall(
        r"^\s*(from ortlaunch[\w.]* import [\w, ]+|import ortlaunch[\w.]*)", text, re.M
    )
    found = list[str]()
    for line in lines:
        (statement,) = ast.parse(line.strip().rstrip(",")).body
        if isinstance(statement, ast.ImportFrom):
            found += [f"{statement.module}.{alias.name}" for alias in statement.names]
        elif isinstance(statement, ast.Import):
            found += [alias.name for alias in statement.names]
    return found


def is_public(name: str) -> bool:
    """Whether a name is `ortlaunch` itself, one of its names, or in a public module."""
    module, _, last = name.rpartition(".")
    return (
        name == "ortlaunch"
        or (module == "ortlaunch" and last in ortlaunch.__all__)
        or (f"{module}." + last).startswith(MODULES)
    )
