"""The examples of docs/ortmodule.md: a plain loop and the Trainers of Hugging Face and Lightning.

Each runs with and without ORT.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ortmodule import Settings
from ortmodule._internal import module
from ortmodule._internal.base.counters import tally
from ortmodule._internal.base.settings import SettingError
from ortmodule._internal.pass_counters import PassAndGraphCounters
from ortmodule_tests.ort import needs_ort

pytestmark = needs_ort
PAGE = (Path(__file__).parents[2] / "docs" / "ortmodule.md").read_text(encoding="utf-8")
# Pairs of a section's title and the first Python block in it.
EXAMPLES = re.findall(r"^## (.*?)$.*?^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


def run(example: str) -> dict[str, Any]:
    """Run an example and return the names that it defines."""
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(example, "docs/ortmodule.md", "exec"), names)
    return names


# The trainers give warnings of their own.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("title", "needs"), [(EXAMPLES[0][0], []), (EXAMPLES[1][0], ["transformers", "accelerate"]),
                                              (EXAMPLES[2][0], ["lightning"])])  # fmt: skip
def test_losses_are_eagers(
    title: str,
    needs: list[str],
    witness: PassAndGraphCounters,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Twenty steps have eager's losses, and frozen parameters get no gradient."""
    for package in needs:
        pytest.importorskip(package)
    # The trainers write files to the current folder.
    monkeypatch.chdir(tmp_path)
    example = dict(EXAMPLES)[title]
    before = tally.exports
    ours = run(example)
    passes = witness.forward_passes
    exports = tally.exports - before
    # The same example with the plain model.
    monkeypatch.setattr(module, "ORTModule", lambda model, settings=None: model)
    theirs = run(example)
    assert len(ours["losses"]) == 20
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-5, abs=0)
    assert (passes, witness.forward_passes) == (20, 20)
    # A changed argument causes a second export.
    assert exports == (2 if "scale" in example else 1)
    net = ours.get("net") or ours["bert"]
    frozen = [parameter for parameter in net.parameters() if not parameter.requires_grad]
    assert frozen
    assert all(parameter.grad is None for parameter in frozen)


def test_importing_it_is_light() -> None:
    """Settings and checks import nothing heavy; ORTModule nothing of a launcher."""
    code = "import sys; from ortmodule import {}; print(*sorted(sys.modules))"
    for name, absent in (
        ("Settings, check, setup", {"torch", "numpy", "onnx", "onnxruntime", "ortlaunch"}),
        ("ORTModule", {"pydantic", "transformers", "ortlaunch"}),
    ):
        done = subprocess.run(
            [sys.executable, "-c", code.format(name)], capture_output=True, text=True, check=True
        )
        assert not absent & set(done.stdout.split())


@pytest.mark.parametrize(
    ("setting", "value"),
    [("opset", 13), ("log_level", "loud"), ("memory_optimization", 3), ("custom_autograd", "yes")],
)
def test_a_wrong_setting_is_refused(setting: str, value: Any) -> None:
    """The error has the setting's value and the valid values."""
    with pytest.raises(
        SettingError, match=rf"setting {setting}: got {value!r}; it must be one of "
    ):
        Settings(**{setting: value})
