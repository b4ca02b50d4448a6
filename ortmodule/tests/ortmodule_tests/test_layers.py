"""The imports between the modules of this package, and from other packages."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import ortmodule

ROOT = Path(ortmodule.__file__).parent
# The layers of _internal, low to high: a module imports from its own layer and lower ones. Modules
# directly in _internal are above all layers, but for those that are named here.
LAYERS = (
    "version", "errors", "native", "base", "deepspeed", "tracing", "torch_in_graph", "state", "graph_repairs"
)  # fmt: skip
OTHER_PACKAGES = {"torch", "onnx", "onnxruntime", "numpy", "deepspeed", "sympy"}
# These import nothing heavy, so that a command may ask what is missing.
LIGHT = ("__init__", "loops", "__main__", "_internal.errors", "_internal.version", "_internal.base.settings",
         "_internal.native.extensions", "_internal.native.extension_sources", "_internal.native.extension_cache",
         "_internal.native.check")  # fmt: skip


def modules() -> Iterator[tuple[str, list[str]]]:
    """Yield the dotted name of each module in the package, and the names that it imports."""
    for path in sorted(ROOT.rglob("*.py")):
        names: list[str] = []
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                assert not node.level, f"{path}: a relative import"
                names += [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                names += [alias.name for alias in node.names]
        yield ".".join(path.relative_to(ROOT).with_suffix("").parts), names


def height(name: str) -> int:
    """Return the layer of a name in _internal."""
    layer = name.split(".")[1]
    return LAYERS.index(layer) if layer in LAYERS else len(LAYERS)


def test_no_layer_imports_a_higher_one() -> None:
    """The layers are a ladder."""
    found = {
        f"{module} imports {name}"
        for module, names in modules()
        for name in (name.removeprefix("ortmodule.") for name in names)
        if module.startswith("_internal.") and name.startswith("_internal.")
        if height(name) > height(module)
    }
    assert found == set()


def test_the_packages_that_are_imported() -> None:
    """Only the dependencies are imported; the light modules import the standard library alone."""
    import sys

    for module, names in modules():
        others = {name.partition(".")[0] for name in names} - {
            *sys.stdlib_module_names,
            "ortmodule",
        }
        allowed = OTHER_PACKAGES | ({"transformers"} if module.startswith("trainer.") else set())
        assert others <= (set() if module in LIGHT else allowed), module
