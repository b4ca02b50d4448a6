"""The imports between the packages of ortlaunch follow one table.

The control side stays light, and it shares little more than the run folder with the worker.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.control.test_package import DISTRIBUTIONS, OPTIONAL, requirements

ROOT = Path(__file__).parents[2] / "ortlaunch"
ANY = None

# The ground floor: modules that both sides and every package may import.
GROUND = {
    "version",
    "base.cause",
    "base.errors",
    "base.json_types",
    "rank",
    "base.process",
    "base.machine",
    "base.units",
    "tables.launchers",
    "tables.metrics",
    "tables.model_tasks",
    "tables.families",
    "tables.optimizers",
    "tables.precisions",
    "tables.text_losses",
    "base.module_start",
    "tables.tasks",
    "base.die_with_parent",
    "base.forked_process",
    "base.installed",
}
# Modules that the worker may import beside itself: the ground floor, and the modules
# that both sides use.
SHARED = {
    *GROUND,
    "base.cache",
    "base.file_errors",
    "user_modules",
    "launch_plan",
    "recipe",
    "run_folder",
}
CONTROL = {
    "base.output",
    "planning",
    "launch",
    "schedulers",
    "resolve",
    "bench",
    "doctor",
    "diagnose",
    "report",
    "importers",
    "run",
    "started_runs",
    "search",
}
# The imports allowed to a module or package: names in ortlaunch, then third-party packages.
# For a module, the line with the longest matching name counts.
ALLOWED: dict[str, tuple[set[str], set[str] | None]] = {
    "__init__": (
        {
            "version",
            "api",
            "diagnose",
            "launch_plan",
            "started_runs",
            "planning",
            "recipe",
            "resolve",
            "search",
        },
        set(),
    ),
    "version": (set(), set()),
    "__main__": ({"cli"}, set()),
    "base.cause": (set(), set()),
    "base.errors": ({"base.cause"}, set()),
    "base.json_types": ({"base.errors"}, set()),
    "rank": ({"base.errors"}, set()),
    "base.cache": ({"base.errors", "base.json_types", "run_folder"}, set()),
    "base.file_errors": ({"base.errors", "base.cache"}, set()),
    "base.output": ({"base.errors", "base.units"}, set()),
    "base.machine": ({"base.process", "base.json_types"}, set()),
    "base.module_start": (set(), set()),
    "base.process": (set(), set()),
    "base.die_with_parent": (set(), set()),
    "base.forked_process": ({"base.process"}, set()),
    "base.units": (set(), set()),
    "base.installed": (set(), set()),
    "tables.launchers": (set(), set()),
    "tables.metrics": (set(), set()),
    "tables.model_tasks": (set(), set()),
    "tables.optimizers": (set(), set()),
    "tables.precisions": (set(), set()),
    "tables.text_losses": (set(), set()),
    "tables.families": (set(), set()),
    "tables.tasks": ({"base.module_start", "base.errors"}, set()),
    "user_modules": ({"base.errors", "recipe"}, set()),
    "launch_plan": (
        {"base.errors", "base.json_types", "rank", "tables.launchers", "tables.tasks"},
        set(),
    ),
    "recipe": (
        {
            "base.errors",
            "base.json_types",
            "recipe",
            "base.units",
            "tables.launchers",
            "tables.metrics",
            "tables.model_tasks",
            "tables.families",
            "tables.optimizers",
            "tables.precisions",
            "tables.tasks",
            "tables.text_losses",
        },
        {"pydantic", "pydantic_core", "yaml"},
    ),
    "run_folder": ({*GROUND, "launch_plan", "recipe", "run_folder"}, set()),
    # Measurements of this environment that a run writes into the cache, and plans read.
    **dict.fromkeys(
        ("run_folder.cached_process_memory", "run_folder.cached_prediction"),
        ({*GROUND, "base.cache", "recipe", "launch_plan", "run_folder"}, set()),
    ),
    "run_folder.records": ({"base.json_types"}, set()),
    "run_folder.export_records": (set(), set()),
    "run_folder.device_folder": (set(), set()),
    "planning": ({*GROUND, "recipe", "launch_plan", "planning"}, set()),
    "planning.prediction_table": (
        {"base.units", "launch_plan", "recipe", "run_folder.cached_prediction"},
        set(),
    ),
    "planning.memory": (
        {
            "recipe",
            "tables.families",
            "base.json_types",
            "launch_plan",
            "planning.activations",
            "planning.fsdp_memory",
            "planning.model_sizes",
            "planning.quantized_layers",
            "planning.startup",
        },
        set(),
    ),
    "planning.fitting": (
        {
            *("base.errors", "base.units", "launch_plan", "recipe", "planning"),
            *("tables.families", "tables.launchers"),
        },
        set(),
    ),
    "planning.fsdp_memory": (
        {"recipe", "tables.families", "launch_plan", "planning.model_sizes", "planning.startup"},
        set(),
    ),
    "planning.quantized_layers": (
        {"recipe", "launch_plan", "tables", "planning.model_sizes"},
        set(),
    ),
    "planning.startup": ({"recipe", "launch_plan"}, set()),
    "planning.model_sizes": (
        {"base.json_types", "tables.model_tasks", "tables.families", "recipe"},
        set(),
    ),
    "planning.activations": (
        {"tables.families", "recipe", "base.json_types", "base.machine"},
        set(),
    ),
    "launch": ({*GROUND, "launch_plan", "run_folder", "launch"}, set()),
    "schedulers": (
        {*GROUND, "launch_plan", "run_folder", "launch", "schedulers"},
        {"yaml"},
    ),  # manifests are YAML
    "resolve": (
        {
            *GROUND,
            "base.cache",
            "base.output",
            "user_modules",
            "recipe",
            "launch_plan",
            "planning",
            "launch",
            "run_folder",
            "resolve",
        },
        set(),
    ),
    "doctor": (
        {
            *GROUND,
            "base.cache",
            "recipe",
            "launch_plan",
            "planning",
            "launch",
            "doctor",
        },
        {"ortmodule"},
    ),
    # The source of this module is sent to the hosts: it imports json_types for type checkers only.
    "doctor.probe": ({"base.json_types"}, set()),
    "bench": (
        {
            *GROUND,
            "base.cache",
            "recipe",
            "launch_plan",
            "launch",
            "doctor",
            "diagnose",
            "run_folder",
            "resolve",
            "report",
            "bench",
        },
        {"matplotlib"},
    ),
    "started_runs": (
        {
            *GROUND,
            "base.cache",
            "user_modules",
            "recipe",
            "launch_plan",
            "launch",
            "schedulers",
            "diagnose",
            "run_folder",
            "started_runs",
            "search",
        },
        set(),
    ),
    "diagnose": (
        {
            *GROUND,
            "recipe",
            "launch_plan",
            "planning",
            "run_folder",
            "diagnose",
        },
        set(),
    ),
    "run": (
        {
            *GROUND,
            "base.cache",
            "user_modules",
            "base.output",
            "recipe",
            "launch_plan",
            "planning",
            "launch",
            "schedulers",
            "bench",
            "doctor",
            "diagnose",
            "run_folder",
            "resolve",
            "started_runs",
            "run",
        },
        set(),
    ),
    "search": ({"base.errors", "base.json_types", "recipe", "run_folder", "search"}, set()),
    "search.study": (
        {"base.errors", "recipe", "search"},
        {"optuna"},
    ),  # the only module that imports it
    "importers": (
        {
            "base.errors",
            "base.json_types",
            "recipe",
            "tables.metrics",
            "tables.model_tasks",
            "tables.optimizers",
            "importers",
        },
        set(),
    ),
    "report": (
        {*GROUND, "recipe", "run_folder", "started_runs", "search", "report"},
        {"yaml", "jinja2", "markupsafe"},
    ),
    "api": (
        {*SHARED, *CONTROL, "api"} - {"base.output"},
        {"tqdm", "pandas"},
    ),
    "api.protocols": (set(), {"torch"}),  # for type checkers alone
    "api.json_outputs": (
        {"base.errors", "doctor", "planning.fitting", "resolve", "started_runs"},
        {"pydantic"},
    ),
    "cli": (
        {
            "__init__",
            "api",
            "base.errors",
            "base.file_errors",
            "base.output",
            "base.units",
            "version",
            "tables.launchers",
            "cli",
        },
        {"typer"},
    ),
    # Verbs of the shell alone, which the API does not have.
    "cli.options": ({"base.errors", "tables.launchers", "planning", "resolve"}, {"typer"}),
    "cli.hints": ({"base.errors", "recipe", "cli"}, {"typer"}),
    "cli.cluster.doctor": ({"doctor", "run", "cli"}, {"typer"}),
    "cli.reference": ({"api", "cli"}, {"typer"}),
    "cli.cluster.ranks": ({"base.errors", "rank"}, {"typer"}),
    "cli.results.evaluate": (
        {"api", "base.errors", "base.output", "run_folder", "cli"},
        {"typer"},
    ),
    "cli.training.sweep": (
        {"__init__", "base.output", "base.process", "rank", "cli"},
        {"typer"},
    ),
    "cli.results.device": ({"base.errors", "api", "tables.tasks", "cli"}, {"typer"}),
    "cli.setup": (
        {
            "__init__",
            "base.errors",
            "doctor",
            "importers",
            "base.output",
            "recipe",
            "resolve",
            "run_folder",
            "base.units",
            "api",
            "cli",
        },
        {"typer"},
    ),
    "cli.setup.setup": ({"cli"}, {"typer", "ortmodule"}),
    "cli.training.bench": ({"base.output", "bench", "resolve", "cli"}, {"typer"}),
    "cli.training.data": ({"__init__", "api", "cli"}, {"typer"}),
    "worker": ({*SHARED, "worker"}, ANY),
}
# Layers (sub-packages) of a package, low to high: a module imports from its own layer and lower
# ones. Modules directly in the package are above all layers, except those that are named here.
FLOORS = {
    "recipe": ("text", "fields", "rules", "hints", "manual"),
    "worker": (
        "patching",
        "call_types",
        "tensor_batch",
        "allocator",
        "weight_memory",
        "supervision",
        "process_group",
        "data",
        "data_audit",
        "model",
        "deepspeed",
        "engine",
        "checkpoint",
        "onnx",
        "run_length",
        "session",
        "evaluation",
        "device",
        "export",
        "training",
        "tasks",
    ),
}
MODULES = sorted(path.relative_to(ROOT) for path in ROOT.rglob("*.py"))


# Cached because several tests parse each module. The trees are shared: do not change them.
parsed = functools.cache(ast.parse)


@functools.cache
def is_module(name: str) -> bool:
    """Return whether a dotted name is a module or package of this repository."""
    path = ROOT.parent.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def imported(tree: ast.AST, package: tuple[str, ...]) -> Iterator[str]:
    """Yield the dotted names of all imports of a module; relative names are made absolute.

    Imports inside functions, imports under `if TYPE_CHECKING:` and string arguments of
    `import_module` are included.
    """
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and node.args
            and ast.unparse(node.func).endswith("import_module")
        ):
            text = node.args[0]
            if isinstance(text, ast.Constant) and str(text.value).startswith("ortlaunch."):
                yield str(text.value)
    for node in statements(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = (
                ("ortlaunch", *package)[: 1 + len(package) - (node.level - 1)] if node.level else ()
            )
            module = ".".join((*above, *([node.module] if node.module else [])))
            # `from ortlaunch import launch_plan` imports a module;
            # `from ortlaunch import __version__` imports the package.
            yield from (
                f"{module}.{name}" if is_module(f"{module}.{name}") else module
                for name in (alias.name for alias in node.names)
            )


def statements(tree: ast.AST) -> Iterator[ast.stmt]:
    """Yield every statement of a tree; expressions are skipped because they are many."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.stmt):
            yield node
        if isinstance(node, (ast.stmt, ast.excepthandler)):
            yield from statements(node)


def floor(name: str) -> tuple[str, int]:
    """Return the layered package of a dotted name and the height of its layer, or ("", 0)."""
    parts = name.split(".")[1:]
    if not parts or parts[0] not in FLOORS:
        return "", 0
    rooms = FLOORS[parts[0]]
    return parts[0], rooms.index(parts[1]) if len(parts) > 1 and parts[1] in rooms else len(rooms)


def upwards(module: Path, source: str) -> set[str]:
    """Return the imported modules that are in a higher layer of the same package."""
    package, here = floor(dotted(module))
    names = {name for name in imported(parsed(source), module.parts[:-1]) if package}
    names -= {f"ortlaunch.{package}"}  # the package's own names
    return {name for name in names if floor(name)[0] == package and floor(name)[1] > here}


@functools.cache
def group(module: str) -> str:
    """Return the key of ALLOWED or SHARED for a name, such as launch for ortlaunch.launch.mpi."""
    parts = module.split(".")[1:]
    lines = {*ALLOWED, *SHARED}
    return next(
        (name for i in range(len(parts), 0, -1) if (name := ".".join(parts[:i])) in lines),
        "__init__",
    )


@functools.cache
def in_standard_library(name: str) -> bool:
    """Return whether a top-level module belongs to the standard library."""
    if name in sys.builtin_module_names:
        return True
    spec = importlib.util.find_spec(name)
    origin = (spec.origin if spec else None) or ""
    if origin in ("built-in", "frozen"):
        return True
    return origin.startswith(sysconfig.get_path("stdlib")) and "site-packages" not in origin


def forbidden(module: Path, source: str) -> set[str]:
    """Return the imports that neither the module's line of ALLOWED nor the standard library has."""
    ours, theirs = ALLOWED[group(dotted(module))]
    names = set(imported(parsed(source), module.parts[:-1]))
    inside = {name for name in names if name.split(".")[0] == "ortlaunch"}
    outside = {name.split(".")[0] for name in names - inside}
    found = {name for name in inside if not {group(name), group(name).split(".")[0]} & ours}
    return (
        found
        if theirs is ANY
        else found | {name for name in outside - theirs if not in_standard_library(name)}
    )


def circle(sources: Mapping[Path, str]) -> list[str]:
    """Return the modules of one import cycle, or [] if there is none."""
    graph = {}
    for module, source in sources.items():
        here = dotted(module).removesuffix(".__init__")
        graph[here] = _imported(source, module.parts[:-1]) - {here}
    done = set[str]()

    def walk(module: str, path: list[str]) -> list[str]:
        if module in path:
            return path[path.index(module) :]
        for name in sorted(graph.get(module, set()) - done):
            if found := walk(name, [*path, module]):
                return found
        done.add(module)
        return []

    return next((found for module in sorted(graph) if (found := walk(module, []))), [])


@functools.cache
def _imported(source: str, package: tuple[str, ...]) -> frozenset[str]:
    return frozenset(imported(parsed(source), package))


def dotted(module: Path) -> str:
    """Return the dotted name of a file: `launch/mpi.py` gives `ortlaunch.launch.mpi`."""
    return ".".join(("ortlaunch", *module.with_suffix("").parts))


@pytest.fixture(scope="module")
def sources() -> dict[Path, str]:
    """The source text of every module of ortlaunch."""
    return {module: (ROOT / module).read_text(encoding="utf-8") for module in MODULES}


def test_a_module_imports_only_what_the_table_allows(sources: dict[Path, str]) -> None:
    """Each import, also inside a function, is in the module's line of ALLOWED or the stdlib."""
    found = {str(module): forbidden(module, source) for module, source in sources.items()}
    assert {module: names for module, names in found.items() if names} == {}


def test_no_room_imports_a_higher_one(sources: dict[Path, str]) -> None:
    """In recipe and worker no module imports from a higher layer."""
    found = {str(module): upwards(module, source) for module, source in sources.items()}
    assert {module: names for module, names in found.items() if names} == {}


def test_no_room_is_crowded() -> None:
    """A folder holds at most 23 modules; those in its sub-folders do not count."""
    counts = Counter(str(module.parent) for module in MODULES)
    assert {folder: count for folder, count in counts.items() if count > 23} == {}


def test_no_module_imports_itself_by_way_of_others(sources: dict[Path, str]) -> None:
    """There is no import cycle, neither at module level nor inside functions."""
    assert circle(sources) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("base/errors.py", "from ortlaunch import rank"),
        ("rank.py", "import ortlaunch.launch_plan"),
        ("base.machine.py", "from ortlaunch.base.errors import PlanError"),
        ("launch_plan.py", "from ortlaunch.recipe import Recipe"),
        ("launch_plan.py", "import pydantic"),
        ("recipe/rules/rules.py", "from ortlaunch.launch_plan import Plan"),
        ("recipe/rules/rules.py", "import torch"),
        ("planning/world.py", "from ortlaunch.resolve.resolve import load_and_resolve_recipe"),
        ("planning/world.py", "from ortlaunch.launch import LaunchRequest"),
        ("launch/mpi.py", "from ..recipe import Recipe"),
        ("launch/mpi.py", "import ortlaunch.worker.engine"),
        ("launch/processes.py", "def f():\n    from ortlaunch.planning import world"),
        (
            "launch/processes.py",
            "from ortlaunch.resolve.prepare import write_run_files_and_clear_earlier_start",
        ),
        ("run_folder/folder.py", "from ortlaunch.launch import LaunchRequest"),
        ("run_folder/lock.py", "from ortlaunch.run.control import lock_folder_and_run_training"),
        ("resolve/resolve.py", "from ortlaunch.bench import auto"),
        ("resolve/resolve.py", "from ortlaunch import doctor"),
        ("started_runs/status.py", "from ortlaunch.resolve import resume"),
        (
            "started_runs/status.py",
            "def f():\n    importlib.import_module('ortlaunch.run.control')",
        ),
        ("run/control.py", "from ortlaunch.cli import main"),
        ("run/control.py", "from ortlaunch.worker.tasks import train"),
        ("bench/variant_job.py", "from ortlaunch.run import control"),
        (
            "bench/auto.py",
            "from ortlaunch.run.micro_size import search_and_record_largest_micro_size",
        ),
        ("doctor/__init__.py", "from ortlaunch.resolve.resolve import load_and_resolve_recipe"),
        ("cli/training/train.py", "from ortlaunch.worker.engine import engine"),
        ("cli/training/train.py", "def f():\n    import torch"),
        ("worker/engine/engine.py", "from ortlaunch.launch import LaunchRequest"),
        ("worker/engine/engine.py", "from ortlaunch.cli import main"),
        ("worker/engine/engine.py", "from ortlaunch.planning.world import World"),
        ("worker/session.py", "from ortlaunch.run import control"),
    ],
)
def test_a_planted_import_is_found(module: str, source: str) -> None:
    """Each forbidden direction of import is found in a planted statement."""
    assert len(forbidden(Path(module), source)) == 1


@pytest.mark.parametrize(
    ("module", "planted", "found"),
    [
        (
            "resolve/resolve.py",
            "from ortlaunch.resolve import prepare",
            {"resolve.prepare", "resolve.resolve"},
        ),
        (
            "bench/variant_job.py",
            "def f():\n    from ortlaunch.run import control",
            {"bench.variant_job", "run.control"},
        ),
        ("launch_plan.py", "from .launch import attempts", {"launch.attempts", "launch_plan"}),
        (
            "base/errors.py",
            "if typing.TYPE_CHECKING:\n    from ortlaunch import rank",
            {"base.errors", "rank"},
        ),
        (
            "worker/engine/stepping.py",
            "importlib.import_module('ortlaunch.worker.tasks.train')",
            {"worker.tasks.train"},
        ),
    ],
)
def test_a_planted_circle_is_found(
    module: str, planted: str, found: set[str], sources: dict[Path, str]
) -> None:
    """A cycle is found: direct, through other modules, for type checkers only, or from a string."""
    around = circle({**sources, Path(module): f"{sources[Path(module)]}\n{planted}"})
    assert {f"ortlaunch.{name}" for name in found} <= set(around)
    assert bool(around) == bool(found)


def test_every_imported_package_is_declared(sources: dict[Path, str]) -> None:
    """Every imported package is a dependency; packages that only some runs need are extras."""
    found = {
        name.partition(".")[0]
        for source in sources.values()
        for name in imported(parsed(source), ())
    }
    others = {name for name in found - {"ortlaunch"} if not in_standard_library(name)}
    packages = {DISTRIBUTIONS.get(name, name) for name in others}
    assert {"torch", "typer", "onnx", "safetensors", "ortmodule"} <= packages
    assert packages - OPTIONAL - set(requirements()) == set()
    assert OPTIONAL - set(requirements("*")) == set()


def test_a_class_name_exists_once(sources: dict[Path, str]) -> None:
    """A class has its name alone, except for the protocols of the public API."""
    found: dict[str, list[str]] = {}
    for module, source in sources.items():
        for node in parsed(source).body:
            if isinstance(node, ast.ClassDef) and module != Path("api/protocols.py"):
                found.setdefault(node.name, []).append(module.as_posix())
    assert {name: places for name, places in found.items() if len(places) > 1} == {}


def test_lists_of_parameters_are_short(sources: dict[Path, str]) -> None:
    """A function has at most six parameters; commands in cli are exempt."""
    long = {}
    for module, source in sources.items():
        for node in statements(parsed(source)) if module.parts[0] != "cli" else ():
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                names = [
                    arg.arg
                    for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
                ]
                if len([name for name in names if name not in ("self", "cls")]) > 6:
                    long[f"{module}:{node.name}"] = names
    assert long == {}


@pytest.mark.parametrize(
    ("source", "package", "names"),
    [
        ("import ortlaunch.worker.tasks.train", (), ["ortlaunch.worker.tasks.train"]),
        (
            "from ortlaunch import launch_plan, __version__",
            (),
            ["ortlaunch.launch_plan", "ortlaunch"],
        ),
        ("from ortlaunch.launch.mpi import launch_request_of_plan", (), ["ortlaunch.launch.mpi"]),
        ("from . import mpi", ("launch",), ["ortlaunch.launch.mpi"]),
        ("from .. import worker", ("launch",), ["ortlaunch.worker"]),
        ("from ..worker import model", ("launch",), ["ortlaunch.worker.model"]),
        ("def f():\n    import torch.nn", (), ["torch.nn"]),
    ],
)
def test_imports_are_found(source: str, package: tuple[str, ...], names: list[str]) -> None:
    """`imported` finds every form of import statement."""
    assert list(imported(ast.parse(source), package)) == names


def test_only_the_engine_names_ort_classes(sources: dict[Path, str]) -> None:
    """ORTModule, FusedAdam and FP16_Optimizer are used in one package alone."""
    classes = {"ORTModule", "FusedAdam", "FP16_Optimizer"}
    users = set()
    for module, source in sources.items():
        for node in ast.walk(parsed(source)) if any(name in source for name in classes) else ():
            name = (
                node.id
                if isinstance(node, ast.Name)
                else node.attr
                if isinstance(node, ast.Attribute)
                else ""
            )
            aliases = (
                [alias.name for alias in node.names]
                if isinstance(node, (ast.Import, ast.ImportFrom))
                else []
            )
            if classes & {name, *aliases}:
                users.add(str(module))
    assert users != set()
    assert {user for user in users if not user.startswith("worker/engine/")} == set()


def test_of_ortmodule_the_face_alone_is_imported(sources: dict[Path, str]) -> None:
    """No module imports a private module of the distribution ortmodule."""
    found = {
        f"{module}: {name}"
        for module, source in sources.items()
        for name in imported(parsed(source), module.parts[:-1])
        if name.startswith("ortmodule") and name not in ("ortmodule", "ortmodule.loops")
    }
    assert found == set()


def test_plan_json_is_read_by_its_type_alone(sources: dict[Path, str]) -> None:
    """No module reads plan.json as a mapping; a renamed field would break that silently."""
    raw = [
        f"{module}:{node.lineno}"
        for module, source in sources.items()
        for node in (ast.walk(parsed(source)) if "(run.plan" in source else ())
        if isinstance(node, ast.Call)
        and ast.unparse(node).startswith(("read_json(run.plan", "json.loads(run.plan"))
    ]
    assert raw == []
