"""Values of Python in a recipe: those with a form in a file, and those that ranks cannot read."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import ortlaunch
from ortlaunch.base.errors import RecipeError
from ortlaunch.recipe.text.python_values import json_value_or_importable_name_or_add_problem
from tests.makers import CUSTOM


def of_main() -> list[int]:
    return []


# As a notebook's function.
of_main.__module__ = "__main__"


class Rows:
    """A data set of this process."""


@pytest.mark.parametrize(
    ("value", "form"),
    [
        (np.int64(3), 3),
        (np.array([[0.5], [2.0]]), [[0.5], [2.0]]),
        (range(2), [0, 1]),
        (Path("a"), "a"),
        ({3: (None, True)}, {"3": [None, True]}),
    ],
)
def test_values_with_a_form(value: Any, form: object) -> None:
    """Numbers and arrays of NumPy, sequences and paths are written as a file has them."""
    problems: list[str] = []
    assert (
        json_value_or_importable_name_or_add_problem(value, ("train",), problems),
        problems,
    ) == (form, [])


def test_a_function_of_a_module_is_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that another process can import is its name; one of a class or script is not."""
    # In no file: only the name counts.
    module = ModuleType("own_data")
    exec("def make(): ...\nclass Data:\n    def make(self): ...", vars(module))
    monkeypatch.setitem(sys.modules, "own_data", module)
    problems: list[str] = []
    assert (
        json_value_or_importable_name_or_add_problem(
            module.make, ("data", "train", "factory"), problems
        )
        == "own_data:make"
    )
    assert (
        json_value_or_importable_name_or_add_problem(
            module.Data, ("data", "train", "factory"), problems
        )
        == "own_data:Data"
    )
    assert not problems
    # `module:Data.make` is no name that a recipe can have.
    json_value_or_importable_name_or_add_problem(
        module.Data.make, ("data", "train", "factory"), problems
    )
    assert problems


PARQUET = 'and give {"format": "parquet", "path": "data.parquet"} as the source'
IN_A_FILE = (
    "to a file (in a notebook: %%writefile my_code.py as the first line of a cell), and give "
)


@pytest.mark.parametrize(
    ("value", "form"),
    [
        (of_main, f'of_main of this process.*; write of_main {IN_A_FILE}"my_code:of_main"'),
        (lambda: 3, f'function .*a function that returns it {IN_A_FILE}"my_code:function"'),
        (Rows(), f'Rows of .*a function that returns it {IN_A_FILE}"my_code:function"'),
        ((row for row in ()), "generator of this process.*a function that returns it"),
        (
            [{"text": "a"}],
            rf'write datasets.Dataset.from_list\(rows\).to_parquet\("data.parquet"\), {PARQUET}',
        ),
        # As pandas and `datasets`, polars, pyarrow and a tokenizer have them.
        (SimpleNamespace(to_parquet=1), rf'write .to_parquet\("data.parquet"\), {PARQUET}'),
        (SimpleNamespace(write_parquet=1), rf'write .write_parquet\("data.parquet"\), {PARQUET}'),
        (SimpleNamespace(to_pylist=1), rf"write pyarrow.parquet.write_table\(.*, {PARQUET}"),
        (SimpleNamespace(save_pretrained=1), r'write .save_pretrained\("FOLDER"\), and give "FOLD'),
    ],
)
def test_data_and_functions_of_this_process(value: Any, form: str) -> None:
    """Values that only this process has are refused at their key, with a form for ranks."""
    message = form.replace("(in", r"\(in").replace("cell)", r"cell\)")
    for source in ({"format": "custom", "factory": value}, value):
        key = "data.train.factory" if isinstance(source, dict) else "data.train"
        with pytest.raises(RecipeError, match=f"(?s)^recipe: {key}: got .*{message}"):
            ortlaunch.load({**CUSTOM, "data": {"train": source}})
        with pytest.raises(RecipeError, match=f"(?s)^override {key}: got .*{message}"):
            ortlaunch.load(CUSTOM, data={"train": source})


def test_all_values_of_this_process_are_reported() -> None:
    """One error has every such value, of a mapping or of the overrides."""
    wrong: dict[str, Any] = {"model": {"factory": Rows()}, "seed": b"3"}
    both = r"model.factory: got Rows.*\n.*seed: got bytes.*write text, a number, a list or a mapp"
    with pytest.raises(RecipeError, match=both):
        ortlaunch.load(CUSTOM, **wrong)
    with pytest.raises(RecipeError) as caught:
        ortlaunch.load({**CUSTOM, **wrong})
    assert len(str(caught.value).splitlines()) == 2
