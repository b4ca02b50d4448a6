"""Tests that ORTModule's environment variables are refused unless they agree with the recipe."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from ortlaunch.base.errors import PlanError
from ortlaunch.planning.world import LaunchOptions
from ortlaunch.recipe.fields.engine import Engine
from ortlaunch.recipe.fields.ort_variables import (
    FREE_VARIABLES,
    LEFT_OUT,
    ORT_VARIABLES,
    free_variable_and_problem_pairs,
    ort_variable_and_contradiction_pairs,
)
from ortlaunch.resolve.resolve import load_and_resolve_recipe
from tests.makers import CUSTOM, OWN_MODULE

# variable -> (a text that agrees with an engine section, that section, a text that contradicts it).
TEXTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "ORTMODULE_ONNX_OPSET_VERSION": ("18", {"opset": 18}, "17"),
    "ORTMODULE_ENABLE_COMPUTE_OPTIMIZER": ("1", {}, "0"),
    "ORTMODULE_ENABLE_EMBEDDING_SPARSE_OPTIMIZER": ("0", {"sparsity_optimizer": False}, "1"),
    "ORTMODULE_MEMORY_OPT_LEVEL": ("0", {}, "1"),
    "ORTMODULE_ENABLE_MEM_EFFICIENT_GRAD_MGMT": ("0", {}, "1"),
    # Neither 0 nor 1: such a text of a flag never agrees.
    "ORTMODULE_PRINT_INPUT_DENSITY": ("0", {}, "true"),
    "ORTMODULE_FALLBACK_POLICY": (
        "FALLBACK_DISABLE",
        {},
        "FALLBACK_UNSUPPORTED_DATA|FALLBACK_UNSUPPORTED_DEVICE",
    ),
    "ORTMODULE_DEEPCOPY_BEFORE_MODEL_EXPORT": ("0", {"deepcopy_before_export": False}, "1"),
    "ORTMODULE_ENABLE_CUSTOM_AUTOGRAD": ("0", {"custom_autograd": "inline"}, "1"),
    "ORTMODULE_LOG_LEVEL": ("ERROR", {}, "INFO"),
    "ORTMODULE_SAVE_ONNX_PATH": ("here", {"save_onnx": "here"}, "there"),
}
# Variables that name a file: no text of them can agree with a field.
FILES = {
    "ORTMODULE_MEMORY_OPT_CONFIG": "memory_optimization_config",
}


@pytest.fixture(autouse=True)
def own_model(tmp_path: Path) -> None:
    """Write the user's module that the recipes name beside them."""
    (tmp_path / "mine.py").write_text(OWN_MODULE)


def said(name: str, text: str, **engine: Any) -> str:
    """Return the problem of a variable, or ""."""
    return "".join(
        # HOME: other variables of the environment are ignored.
        message
        for _, message in ort_variable_and_contradiction_pairs(
            Engine(**engine), {name: text, "HOME": "x"}
        )
    )


@pytest.mark.parametrize("name", TEXTS)
def test_a_variable_must_say_what_its_field_says(name: str) -> None:
    """A variable that contradicts its field is refused with the field's name and value."""
    agreeing, engine, other = TEXTS[name]
    assert said(name, agreeing, **engine) == ""
    value = getattr(Engine(**engine), ORT_VARIABLES[name].field)
    # As YAML writes it.
    shown = str(value).lower() if isinstance(value, bool) else value
    assert (
        said(name, other, **engine)
        == f"contradicts engine.{ORT_VARIABLES[name].field} ({shown}); set the field instead"
    )


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_settings_is_never_the_recipes_own(name: str) -> None:
    """A variable with a file of settings is refused: the recipe itself has the settings."""
    assert said(name, "some.json").startswith(f"contradicts engine.{FILES[name]} (")


def test_an_open_field_contradicts_every_text() -> None:
    """A null field contradicts every text of its variable, because ortlaunch decides the value."""
    name = "ORTMODULE_DEEPCOPY_BEFORE_MODEL_EXPORT"
    assert (
        said(name, "1") == "contradicts engine.deepcopy_before_export (null); set the field instead"
    )


def test_each_field_has_at_most_one_variable() -> None:
    """Every variable's field exists, and the tables above cover all variables."""
    assert {variable.field for variable in ORT_VARIABLES.values()} <= set(Engine.model_fields)
    assert set(TEXTS) | set(FILES) == set(ORT_VARIABLES)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "ORTMODULE_MEMORY_OPT_LVL",
            "did you mean ORTMODULE_MEMORY_OPT_LEVEL? That is engine.memory_optimization",
        ),
        (
            "ORTMODULE_MEM_OPT_LEVEL",
            "did you mean ORTMODULE_MEMORY_OPT_LEVEL? That is engine.memory_optimization",
        ),
        (
            "ORTMODULE_ENABLE_TRITON",
            "did you mean ORTMODULE_USE_TRITON? That is engine.ort_variables",
        ),
        ("ORTMODULE_FOO", "is no variable of ORTModule 1.19.2; remove it"),
        (
            "ORTMODULE_ENABLE_SPARSE_OPTIMIZER",
            "is documented, but 1.19.2 never reads it; see engine.sparsity_opt",
        ),
        ("ORTMODULE_ENABLE_LABEL_SPARSE_OPTIMIZER", "has no effect in 1.19.2"),
        ("ORTMODULE_SKIPCHECK_POLICY", "models with buffers fail under SKIP_CHECK_DISABLED"),
        ("ORTMODULE_CACHE_DIR", "makes evaluation run the training graph"),
    ],
)
def test_a_variable_without_a_field_is_refused(name: str, expected: str) -> None:
    """A variable without a field is refused with the reason, or with the name that was meant."""
    assert expected in said(name, "1")


def test_a_free_variable_must_be_as_in_the_mapping() -> None:
    """A variable without a field of its own agrees with the same text in `engine.ort_variables`."""
    name = "ORTMODULE_MAX_TUNING_DURATION_MS"
    assert said(name, "5", ort_variables={name: 5}) == ""
    assert (
        said(name, "5", ort_variables={name: 6})
        == f"contradicts engine.ort_variables ({name}: 6); set it there instead"
    )
    assert said(name, "5") == (
        f"contradicts engine.ort_variables ({name}: null); set it there instead"
    )


@pytest.mark.parametrize("name", FREE_VARIABLES)
def test_the_form_of_a_free_variable(name: str) -> None:
    """ORT reads the valid texts; another one is refused with the valid form."""
    form = FREE_VARIABLES[name][1]
    good, bad = {
        "HEURISTIC or EXHAUSTIVE": ("EXHAUSTIVE", "exhaustive"),
        "a whole number": (7, "7s"),
        "a path": ("here", ""),
        "0 or 1": (1, 2),
    }[form]
    assert not [*free_variable_and_problem_pairs(Engine(ort_variables={name: good}))]
    assert [*free_variable_and_problem_pairs(Engine(ort_variables={name: bad}))] == [
        (name, f"got {bad}; it must be {form}")
    ]


def test_every_variable_that_onnx_runtime_reads_is_known() -> None:
    """Every variable in onnxruntime's installed source is in the tables."""
    package = importlib.util.find_spec("onnxruntime")
    if package is None or package.origin is None:
        # The control side works without onnxruntime.
        pytest.skip('needs onnxruntime-training: pip install "ortlaunch[ort-cpu]"')
    sources = list(Path(package.origin).parent.joinpath("training").rglob("*.py"))
    found = {
        name
        for path in sources
        for name in re.findall(r'"(ORTMODULE_[A-Z0-9_]+)"', path.read_text())
    }
    # Otherwise the pattern no longer matches the source.
    assert len(found) >= 25
    assert found <= {*ORT_VARIABLES, *LEFT_OUT, *FREE_VARIABLES}


# -----------------------------------------------------------------------------------------------
# before a launch


def resolved(folder: Path, environ: dict[str, str], **engine: Any) -> tuple[str, ...]:
    """Return the notes of a run with these engine settings in this environment."""
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump({**CUSTOM, "engine": {"name": "ort", **engine}}))
    return load_and_resolve_recipe(path, (), LaunchOptions(), environ).notes


def test_a_contradiction_ends_the_command_before_anything_starts(tmp_path: Path) -> None:
    """The command ends before a launch with one line for each contradiction."""
    environ = {"ORTMODULE_MEMORY_OPT_LEVEL": "1", "ORTMODULE_LOG_LVL": "INFO"}
    with pytest.raises(PlanError) as caught:
        resolved(tmp_path, environ)
    lines = str(caught.value).splitlines()
    assert lines[1] == (
        "ORTMODULE_MEMORY_OPT_LEVEL=1 in your environment contradicts engine.memory_optimization "
        "(0); set the field "
        "instead"
    )
    assert lines[0].startswith(
        "ORTMODULE_LOG_LVL=INFO in your environment is no variable of ORTModule 1.19.2"
    )


def test_settings_and_variables_are_shown(tmp_path: Path) -> None:
    """The notes show settings that are not the defaults, and variables that agree with them."""
    environ = {"ORTMODULE_MEMORY_OPT_LEVEL": "1"}
    assert resolved(tmp_path, environ, memory_optimization=1, opset=18) == (
        "engine ort: memory_optimization: 1, opset: 18",
        "from your environment: ORTMODULE_MEMORY_OPT_LEVEL=1 (from the recipe)",
    )
    assert resolved(tmp_path, {}) == ()


def test_another_engine_has_no_use_for_them(tmp_path: Path) -> None:
    """With another engine the variables are shown, and none is refused."""
    (note,) = resolved(tmp_path, {"ORTMODULE_MEMORY_OPT_LEVEL": "1"}, name="eager")
    assert (
        note == "from your environment: ORTMODULE_MEMORY_OPT_LEVEL=1 (no effect with engine eager)"
    )


def test_the_command_says_so_and_plan_shows_settings(tmp_path: Path) -> None:
    """`ortlaunch plan` ends with status 2 for a contradiction, and shows the settings otherwise."""
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({**CUSTOM, "engine": {"name": "ort", "log_level": "info"}}))
    command = [sys.executable, "-m", "ortlaunch.cli", "plan", str(path)]
    environ = {**os.environ, "ORTMODULE_USE_TRITON": "1"}
    refused = subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=60, check=False
    )
    assert refused.returncode == 2
    assert refused.stderr.startswith(
        "ortlaunch: ORTMODULE_USE_TRITON=1 in your environment contradicts engine.ort_variables"
    )
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert 'engine ort: log_level: "info"' in shown.stdout.splitlines()[0]


def test_the_run_record_keeps_the_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """environment.json has the variables of the shell and of launch.env."""
    from ortlaunch.resolve.prepare import (
        set_aside_and_write_run_files_and_print_plan_unless_restart,
    )
    from ortlaunch.run_folder.folder import RunDir

    monkeypatch.setenv("ORTMODULE_LOG_LEVEL", "ERROR")
    path = tmp_path / "recipe.yaml"
    sections = {"engine": {"name": "ort"}, "launch": {"env": {"ORTMODULE_MEMORY_OPT_LEVEL": "0"}}}
    path.write_text(yaml.safe_dump({**CUSTOM, **sections}))
    run = RunDir(tmp_path / "run")
    set_aside_and_write_run_files_and_print_plan_unless_restart(
        load_and_resolve_recipe(path, (), LaunchOptions(), os.environ), run
    )
    kept = json.loads(run.environment.read_text())["ortmodule_variables"]
    assert kept == {"ORTMODULE_LOG_LEVEL": "ERROR", "ORTMODULE_MEMORY_OPT_LEVEL": "0"}
