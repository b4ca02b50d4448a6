"""Values of Python in a recipe that is a mapping, as a recipe's file would have them.

Ranks are other processes, which read the recipe as text. So data and functions that only this
process has are refused, with the form that ranks can read.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence

from ortlaunch.recipe.text.place import KeyPath, dotted

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


def plain(value: object, path: KeyPath, problems: list[str]) -> object:
    """Return a value as JSON has it; one without such a form goes to `problems`.

    Args:
        value: a value of a recipe.
        path: the path of its key.
        problems: gets a line for each such value, with its key and the form that ranks can read.
    """
    value = os.fspath(value) if isinstance(value, os.PathLike) else value
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(each, (*path, str(key)), problems) for key, each in value.items()}
    form = next((form for name, form in _FORMS.items() if hasattr(value, name)), None)
    # Numbers and arrays of NumPy and torch.
    if form is None and hasattr(value, "tolist"):
        return plain(value.tolist(), path, problems)
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
        if not _are_rows(value, path):
            return [plain(each, (*path, at), problems) for at, each in enumerate(value)]
        form = _ROWS
    if text := _importable_name(value):
        return text
    # Of a lambda or a generator it is no name.
    name = (re.fullmatch(r"\w+", str(getattr(value, "__name__", ""))) or [""])[0]
    if not form and (name or {*path} & {"data", "model", "hook", "metric"}):
        form = _IN_A_FILE.format(name or "a function that returns it", name or "function")
    problems.append(
        f"{dotted(path) or 'the recipe'}: got {name or type(value).__name__} of this process, and "
        f"ranks are other processes; {form or 'write text, a number, a list or a mapping'}"
    )
    return None


def _are_rows(values: Sequence[object], path: KeyPath) -> bool:
    """Return whether a list holds rows of data, in place of the sources of a mixture."""
    is_source = path[:1] == ("data",) and path[-1] in ("train", "evaluation", "factory")
    return is_source and not all(
        isinstance(each, str) or (isinstance(each, Mapping) and {"source", "weight"} & {*each})
        for each in values
    )


def _importable_name(value: object) -> str | None:
    """Return `module:name` of a function or class that another process can import; else None."""
    module, name = (str(getattr(value, each, "")) for each in ("__module__", "__qualname__"))
    # A script or a notebook is no module: an import would run all of it again.
    is_found = module != "__main__" and getattr(sys.modules.get(module), name, None) is value
    return f"{module}:{name}" if name and is_found else None
