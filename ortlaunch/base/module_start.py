"""`python ortlaunch/base/module_start.py MODULE ARGUMENT...`: `python -m MODULE` without the current folder.

`python -m` searches the current folder first for every import, and that folder may have any
numpy.py. A script's own folder is first on the path instead, and it is
removed before any other import.
"""

import sys


def module_command(module: str, python: str = sys.executable) -> tuple[str, str, str]:
    """Return the command that starts a module; its arguments are added at the end."""
    return python, __file__, module


def run_module(module: str, *arguments: str) -> int:
    """Run a module with these arguments, and return its exit status."""
    import subprocess

    return subprocess.run([*module_command(module), *arguments], check=False).returncode


if __name__ == "__main__":
    # With -P or PYTHONSAFEPATH there is no such entry.
    if not sys.flags.safe_path:
        del sys.path[0]
    import runpy

    # A name or a text of the user may have a letter that the terminal's encoding lacks.
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.reconfigure(errors="backslashreplace")
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
