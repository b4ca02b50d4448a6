"""The command line: each verb adapts its arguments and calls one function. Heavy modules load inside the verbs."""

# No `from __future__ import annotations` here: on Python 3.9 Typer would see texts in place of Annotated.
import gc
import os
import sys
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from ortlaunch.cli.hints import Verb, Verbs
from ortlaunch.errors import HostfileError, InputError, OrtlaunchError, RecipeError
from ortlaunch.file_errors import explained
from ortlaunch.output import go_on_unread, guarded

app = typer.Typer(
    name="ortlaunch",
    cls=Verbs,
    help="Train PyTorch models on ONNX Runtime from one recipe, from a laptop to a cluster.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
recipes_app = typer.Typer(help="The shipped recipes: list, show, copy.", no_args_is_help=True)
app.add_typer(recipes_app, name="recipes")

RecipePath = Annotated[
    Path, typer.Argument(help="The recipe: a YAML file, or a name of `ortlaunch recipes list`.", show_default=False)
]
Overrides = Annotated[
    Optional[list[str]],
    typer.Argument(
        metavar="[KEY.PATH=VALUE]...",
        help="Set keys of the recipe, as train.max_steps=100; `ortlaunch schema` lists them.",
        show_default=False,
    ),
]
Launcher = Annotated[
    Optional[str],
    typer.Option("--launcher", help="auto, local, torchrun or mpi; the recipe's launch.launcher by default."),
]
PerNode = Annotated[
    Optional[int],
    typer.Option("--nproc-per-node", min=1, max=9999, help="Ranks on each host; one per GPU, or one, by default."),
]
Hostfile = Annotated[
    Optional[str], typer.Option("--hostfile", "-H", help="Hosts and slots; DeepSpeed, Open MPI or MPICH style.")
]
Include = Annotated[Optional[str], typer.Option("--include", "-i", help="Hosts and slots to use: host1:0,1@host2.")]
Exclude = Annotated[Optional[str], typer.Option("--exclude", "-e", help="Hosts and slots to leave out.")]
RunDirOption = Annotated[
    Optional[Path],
    typer.Option(
        "--run-dir",
        help="Run folder; runs/NAME-TIME by default. An existing one is continued from its newest checkpoint.",
    ),
]


def _version(wanted: bool) -> None:
    if wanted:
        from ortlaunch import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options of the command itself."""


def _asked(
    launcher: Launcher,
    nproc: PerNode,
    hostfile: Hostfile,
    include: Include,
    exclude: Exclude,
    planned_only: bool = False,
) -> Any:
    from ortlaunch.planning.world import LaunchOptions

    if launcher not in (None, "auto", "local", "torchrun", "mpi"):
        raise typer.BadParameter(f"got {launcher}; one of auto, local, torchrun, mpi", param_hint="--launcher")
    return LaunchOptions(launcher, nproc, hostfile, include, exclude, planned_only)


@app.command(cls=Verb)
def validate(recipe: RecipePath, overrides: Overrides = None) -> None:
    """Check a recipe; all errors at once, each with its place."""
    from ortlaunch.recipe import load
    from ortlaunch.run import inputs
    from ortlaunch.run.shipped import locate

    recipe = locate(recipe)
    loaded = load(recipe, overrides or ())
    functions = [loaded.explain(problem) for problem in inputs.broken_factories(loaded.recipe, recipe.parent)]
    if functions and loaded.recipe.launch.nodes in (None, 1):
        raise RecipeError(functions)
    files = [loaded.explain(problem) for problem in inputs.missing_files(loaded.recipe)]
    auto = "; engine auto: measured when training starts" if loaded.recipe.engine.name == "auto" else ""
    typer.echo("\n".join([f"{recipe}: valid ({loaded.recipe.name}{auto})", *files, *functions]))


@app.command(cls=Verb)
def plan(
    recipe: RecipePath,
    overrides: Overrides = None,
    launcher: Launcher = None,
    nproc_per_node: PerNode = None,
    hostfile: Hostfile = None,
    include: Include = None,
    exclude: Exclude = None,
    json: Annotated[bool, typer.Option("--json", help="The whole plan as JSON, stable for diffs.")] = False,
) -> None:
    """Show ranks, batch, memory by ZeRO stage and the command, without running anything."""
    from ortlaunch.planning.describe import describe
    from ortlaunch.planning.memory import why_unknown
    from ortlaunch.run.control import dry_run, preview, resolve
    from ortlaunch.run.folder import RunDir
    from ortlaunch.run.micro_size import note

    asked = _asked(launcher, nproc_per_node, hostfile, include, exclude, planned_only=True)
    resolved = preview(resolve(recipe, overrides or (), asked, os.environ))
    if json:
        typer.echo(resolved.plan.to_json())
        return
    command = dry_run(resolved, RunDir(f"runs/{resolved.plan.name}-TIME")).splitlines()[-1]
    notes = note(resolved.file.recipe, resolved.plan)
    if resolved.plan.memory is None:
        notes.append(f"memory: not known here: {why_unknown(resolved.file.recipe)}")
    shown = describe(resolved.plan, resolved.file.recipe)
    typer.echo("\n".join([*resolved.world.notes, shown, *notes, f"command: {command}"]))


@app.command(cls=Verb)
def train(
    recipe: RecipePath,
    overrides: Overrides = None,
    launcher: Launcher = None,
    nproc_per_node: PerNode = None,
    hostfile: Hostfile = None,
    include: Include = None,
    exclude: Exclude = None,
    run_dir: RunDirOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", "--dryrun", help="Print what would be run, and stop.")] = False,
) -> None:
    """Train a recipe."""
    from ortlaunch.run import control

    asked = _asked(launcher, nproc_per_node, hostfile, include, exclude, planned_only=dry_run)
    resolved = control.resolve(recipe, overrides or (), asked, os.environ)
    if dry_run:
        resolved = control.preview(resolved)
        print(*resolved.world.notes, sep="\n", end="\n" if resolved.world.notes else "", file=sys.stderr)
        typer.echo(control.dry_run(resolved, control.run_folder(run_dir, resolved, os.environ)))
        return
    go_on_unread()
    raise typer.Exit(control.train(resolved, run_dir))


@app.command(cls=Verb)
def parity(
    recipe: RecipePath,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps to compare, with optimizer steps between.")] = 3,
    launcher: Launcher = None,
    nproc_per_node: PerNode = None,
    hostfile: Hostfile = None,
    include: Include = None,
    exclude: Exclude = None,
    run_dir: RunDirOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", "--dryrun", help="Print what would be run, and stop.")] = False,
) -> None:
    """Compare a recipe's engine with plain PyTorch: loss and every gradient; exit status 1 where they differ."""
    only = [*(overrides or ()), f"engine.parity_steps={steps}", "engine.parity_only=true"]
    train(recipe, only, launcher, nproc_per_node, hostfile, include, exclude, run_dir, dry_run)


@app.command(cls=Verb)
def bench(
    recipe: RecipePath,
    overrides: Overrides = None,
    engines: Annotated[
        Optional[str], typer.Option("--engines", help="Engines to compare, as ort,eager; all three by default.")
    ] = None,
    vary: Annotated[
        Optional[list[str]],
        typer.Option("--vary", help="A key and its values, as engine.memory_optimization=0,1; again for another key."),
    ] = None,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Turns of each variant.")] = 5,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Optimizer steps measured in a turn.")] = 4,
    one_at_a_time: Annotated[
        bool,
        typer.Option(
            "--one-at-a-time", help="Start each variant again for every turn, where memory does not hold all of them."
        ),
    ] = False,
    out: Annotated[Optional[Path], typer.Option("--out", help="Folder to write; bench/NAME-TIME by default.")] = None,
    picture: Annotated[bool, typer.Option("--picture/--no-picture", help="bench.png (needs matplotlib).")] = True,
    launcher: Launcher = None,
    nproc_per_node: PerNode = None,
    hostfile: Hostfile = None,
    include: Include = None,
    exclude: Exclude = None,
) -> None:
    """Measure engines and options side by side: speed, memory, time to first step, equality with plain PyTorch."""
    from ortlaunch import bench as benches
    from ortlaunch.run.control import resolve

    resolved = resolve(
        recipe, overrides or (), _asked(launcher, nproc_per_node, hostfile, include, exclude), os.environ
    )
    chosen = tuple(name.strip() for name in engines.split(",")) if engines is not None else ()
    length = benches.Length(rounds, steps, one_at_a_time)
    go_on_unread()
    raise typer.Exit(benches.bench(resolved, chosen, vary or (), length, out, picture))


@app.command(cls=Verb)
def setup() -> None:
    """Build the torch extensions that engine ort needs, once for each torch."""
    from ortlaunch.doctor import set_up

    raise typer.Exit(set_up())


@app.command(cls=Verb)
def schema(
    markdown: Annotated[bool, typer.Option("--markdown", help="The same as a page to read: docs/recipe.md.")] = False,
) -> None:
    """Print the recipe's JSON schema, for editors: every field with its manual."""
    if markdown:
        from ortlaunch.recipe.reference import markdown as text
    else:
        from ortlaunch.recipe.schema import json_schema as text
    typer.echo(text(), nl=False)


@app.command(cls=Verb)
def constraints(
    name: Annotated[
        str, typer.Argument(help="torch-2.13, torch-2.6, or floors: the lowest that was run.")
    ] = "torch-2.13",
) -> None:
    """Print a tested set of versions, for `pip install -c FILE`."""
    from ortlaunch.run.shipped import text

    typer.echo(text("constraints", name), nl=False)


@app.command(cls=Verb)
def hostfile(
    name: Annotated[str, typer.Argument(help="deepspeed, mpich or openmpi.")] = "openmpi",
) -> None:
    """Print an example of a host file, in the style of a launcher."""
    from ortlaunch.run.shipped import text

    typer.echo(text("hostfiles", name), nl=False)


@recipes_app.command("list")
def list_recipes() -> None:
    """Name the shipped recipes."""
    from ortlaunch.run.shipped import names

    typer.echo("\n".join(names()))


@recipes_app.command("show")
def show_recipe(name: Annotated[str, typer.Argument(help="As `ortlaunch recipes list` names it.")]) -> None:
    """Print a shipped recipe."""
    from ortlaunch.run.shipped import find

    typer.echo(find(name).read_text(encoding="utf-8"), nl=False)


@recipes_app.command("copy")
def copy_recipe(
    name: Annotated[str, typer.Argument(help="As `ortlaunch recipes list` names it.")],
    target: Annotated[Path, typer.Argument(help="File or folder to copy it to.")] = Path(),
) -> None:
    """Copy a shipped recipe, with what it extends; never over a file of yours."""
    from ortlaunch.run.shipped import copy

    typer.echo("\n".join(str(path) for path in copy(name, target)))


def main() -> None:
    """Entry point: errors for the user are printed without a traceback."""
    gc.disable()  # with the freeze below, a tenth of the time that a short command takes
    with guarded():
        try:
            _refuse_undecodable(sys.argv[1:])
            app(prog_name="ortlaunch")
        except (RecipeError, HostfileError) as error:  # their lines begin with file:line:column, for editors
            print(error, file=sys.stderr)
            sys.exit(error.exit_status)
        except OrtlaunchError as error:
            sys.exit(_told(error))
        except OSError as error:
            told = explained(error)
            if told is None:
                raise
            sys.exit(_told(told))
        finally:
            gc.freeze()  # so that the interpreter's last collections have nothing to walk through


def _told(error: OrtlaunchError) -> int:
    print(f"ortlaunch: {error}", file=sys.stderr)
    return error.exit_status


def _refuse_undecodable(words: list[str]) -> None:
    """What Python could not decode could not be written into the run folder either."""
    for word in words:
        if not word.isascii() and any("\udc80" <= character <= "\udcff" for character in word):
            raise InputError(
                f"{word!a} is not text in this shell's encoding ({sys.getfilesystemencoding()}); give it in UTF-8, "
                "with LC_ALL=C.UTF-8 or PYTHONUTF8=1 in the environment"
            )
