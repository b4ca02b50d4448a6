"""`python -m ortmodule setup` builds ORT's extensions; `python -m ortmodule check` lists what is missing."""

from __future__ import annotations

import sys

import ortmodule


def main() -> int:
    """Run a command, and return its exit status."""
    if sys.argv[1:] == ["setup"]:
        return ortmodule.setup()
    if sys.argv[1:] == ["check"]:
        missing = ortmodule.check()
        for dependency in missing:
            print(dependency)
        if not missing:
            print("ONNX Runtime Training and its extensions are ready")
        return bool(missing)
    print("usage: python -m ortmodule setup | check", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
