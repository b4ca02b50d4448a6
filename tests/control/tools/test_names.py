"""tools/names.py, which `make check` runs: each limit is crossed by one planted name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[3] / "tools" / "names.py"
CLEAR = """class Plan:
    @property
    def slots(self) -> int:
        return 1


def read_plan(plan_path: str) -> Plan:
    return Plan()


def write_plan(plan: Plan, plan_path: str) -> None:
    with open(plan_path, "w") as plan_file:
        plan_file.write(str(plan))
"""


@pytest.mark.parametrize(
    ("planted", "rule"),
    [
        ("", ""),
        ("found = read_plan('')", "vague binding"),
        ("def claimed(plan_path: str) -> None: ...", "participle"),
        ("def with_hosts(plan: Plan) -> Plan: ...", "preposition"),
        ("def a(x): ...\ndef b(x): ...\ndef c(x): ...", "one word"),
        ("def is_lost(host_name: str) -> None: ...", "predicate without an answer"),
        ("record: dict[str, Any] = {}", "untyped document"),
        (
            "def sort_plans(plans):\n    '''Sort.\n\n    Args:\n        places: the plans.\n    '''",
            "argument without a parameter",
        ),
        ("class Plan: ...", ""),
    ],
)
def test_a_planted_name_crosses_a_limit(planted: str, rule: str, tmp_path: Path) -> None:
    """The exit status is 1, and the rule is printed with its limit; --list prints the name."""
    (tmp_path / "module.py").write_text(f"{CLEAR}\n{planted}\n")
    listed = [sys.executable, str(TOOL), str(tmp_path), "--list", str(tmp_path)]
    done = subprocess.run(listed, capture_output=True, text=True, check=False)
    assert done.returncode == bool(rule), done.stdout + done.stderr
    assert f"{rule}: " in done.stderr if rule else done.stderr.strip() == ""
    assert (f": {rule}: " in done.stdout) is bool(rule)


def test_a_public_class_has_one_definition(tmp_path: Path) -> None:
    """Two modules that define a class of one name are named with their lines."""
    for name in ("one", "two"):
        (tmp_path / f"{name}.py").write_text("class Plan: ...\n")
    done = subprocess.run(
        [sys.executable, str(TOOL), str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert f"class Plan is defined twice: {tmp_path}/one.py:1, {tmp_path}/two.py:1" in done.stderr
