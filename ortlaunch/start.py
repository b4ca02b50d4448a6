"""`python ortlaunch/start.py MODULE ARGUMENT...`: `python -m MODULE` without the current folder on the path.

`python -m` looks for every import in the current folder first, where anybody's numpy.py may lie, and Python 3.10 has
no option -P. Python puts the folder of this file first instead, and it goes before anything is imported.
"""

import sys


def command(module: str, python: str = sys.executable) -> tuple[str, str, str]:
    """What starts a module; its arguments come after it."""
    return python, __file__, module


def run(module: str, *words: str) -> int:
    """Run a module with these arguments; returns its exit status."""
    import subprocess

    return subprocess.run([*command(module), *words], check=False).returncode


if __name__ == "__main__":
    if not getattr(
        sys.flags, "safe_path", False
    ):  # with -P or PYTHONSAFEPATH there is no such entry
        del sys.path[0]
    import runpy

    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
