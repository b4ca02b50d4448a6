"""Values of Python in a recipe that is a mapping, as a recipe's file would have them.

Ranks are other processes, which read the recipe as text. So data and functions that only this
process has are refused, with the form that ranks can read.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence

from ortlaunch.recipe.text.source_location import KeyPath, format_key_path

_PARQUET = 'write {}, and give {{"format": "parquet", "path": "data.parquet"}} as the source'
# An attribute that objects have -> what to write in place of such an object. The first one counts.
_FORMS = {
    "to_diff_dict": "add .to_diff_dict()",
    "save_pretrained": 'write .save_pretrained("FOLDER"), and give "FOLDER"',
    "write_parquet": _PARQUET.format('.write_parquet("data.parquet")'),
    "to_parquet": _PARQUET.format('.to_parquet("data.parquet")'),
    "to_pylist": _PARQUET.format('pyarrow.parquet.write_table(table, "data.parquet")'),
    "iloc": _PARQUET.format('.to_frame("text").to_parquet("data.parquet")'),
}
_ROWS = _PARQUET.format('datasets.Dataset.from_list(rows).to_parquet("data.parquet")')
_IN_A_FILE = (
    "write {} to a file (in a notebook: %%writefile my_code.py as the first line of a cell), and "
    'give "my_code:{}"'
)


def json_value_or_importable_name_or_add_problem(
    value: object, key_path: KeyPath, problem_texts: list[str]
) -> object:
    """Return a value as JSON has it; one without such a form goes to `problem_texts`.

    Args:
        value: a value of a recipe.
        key_path: the path of its key.
        problem_texts: gets a line for each such value, with its key and the form that ranks can read.
    """
    value = os.fspath(value) if isinstance(value, os.PathLike) else value
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, Mapping):
        return {
            str(key): json_value_or_importable_name_or_add_problem(
                item, (*key_path, str(key)), problem_texts
            )
            for key, item in value.items()
        }
    advice = next((advice for name, advice in _FORMS.items() if hasattr(value, name)), None)
    # Numbers and arrays of NumPy and torch.
    if advice is None and hasattr(value, "tolist"):
        return json_value_or_importable_name_or_add_problem(value.tolist(), key_path, problem_texts)
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
        if not _are_data_rows(value, key_path):
            return [
                json_value_or_importable_name_or_add_problem(
                    item, (*key_path, item_index), problem_texts
                )
                for item_index, item in enumerate(value)
            ]
        advice = _ROWS
    if importable_name := _importable_name_or_none(value):
        return importable_name
    # Of a lambda or a generator it is no name.
    name = (re.fullmatch(r"\w+", str(getattr(value, "__name__", ""))) or [""])[0]
    if not advice and (name or {*key_path} & {"data", "model", "hook", "metric"}):
        advice = _IN_A_FILE.format(name or "a function that returns it", name or "function")
    problem_texts.append(
        f"{format_key_path(key_path) or 'the recipe'}: got {name or type(value).__name__} of this process, and "
        f"ranks are other processes; {advice or 'write text, a number, a list or a mapping'}"
    )
    return None


def _are_data_rows(values: Sequence[object], key_path: KeyPath) -> bool:
    """Return whether a list holds rows of data, in place of the sources of a mixture."""
    is_source = key_path[:1] == ("data",) and key_path[-1] in ("train", "evaluation", "factory")
    return is_source and not all(
        isinstance(item, str) or (isinstance(item, Mapping) and {"source", "weight"} & {*item})
        for item in values
    )


def _importable_name_or_none(value: object) -> str | None:
    """Return `module:name` of a function or class that another process can import; else None."""
    module, name = (
        str(getattr(value, attribute_name, "")) for attribute_name in ("__module__", "__qualname__")
    )
    # A script or a notebook is no module: an import would run all of it again.
    is_found = module != "__main__" and getattr(sys.modules.get(module), name, None) is value
    return f"{module}:{name}" if name and is_found else None
