"""Arguments and options shared by several verbs."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ortlaunch.tables.launchers import reason_launcher_is_refused

if TYPE_CHECKING:
    from ortlaunch.planning.world import LaunchOptions


def shipped_recipes(name_prefix: str) -> list[str]:
    """Return the names of shipped recipes with a prefix, for the shell's completion."""
    # The shell adds the files itself.
    from ortlaunch.resolve.shipped import shipped_recipe_names

    return [name for name in shipped_recipe_names() if name.startswith(name_prefix)]


RecipePath = Annotated[
    Path,
    typer.Argument(
        metavar="RECIPE",
        help="The recipe: a YAML file, or a name of `ortlaunch recipes list`.",
        show_default=False,
        autocompletion=shipped_recipes,
    ),
]


def _parse_checkpoint_step(step_text: str) -> int | str:
    if step_text != "best" and not (step_text.isdecimal() and int(step_text)):
        raise typer.BadParameter(f"got {step_text!r}; a step from 1 on, or best")
    return step_text if step_text == "best" else int(step_text)


CheckpointStepOption = Annotated[
    # Typer knows no unions.
    Any,
    typer.Option(
        "--step",
        metavar="STEP|best",
        parser=_parse_checkpoint_step,
        help="Step of the checkpoint; best: that of checkpoint.keep_best; the newest by default.",
        show_default=False,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY.PATH=VALUE",
        help="Set keys of the recipe, as train.max_steps=100; `ortlaunch schema` lists them.",
        show_default=False,
    ),
]
RunDirOption = Annotated[
    Path | None,
    typer.Option(
        "--run-dir",
        help=(
            "Run folder; runs/NAME-TIME by default. An existing one is continued from its "
            "newest checkpoint."
        ),
    ),
]
ResumeOption = Annotated[
    str,
    typer.Option(
        "--resume",
        metavar="auto|never|STEP|PATH",
        help="auto: the run folder's newest complete checkpoint; never: start from step 0; "
        "STEP: the checkpoint of that step; PATH: another run's folder or a checkpoint, "
        "for a run folder without one.",
    ),
]
PortOption = Annotated[
    int,
    typer.Option(
        "--port",
        min=0,
        max=65535,
        help="Port of the first host to which ranks connect; 0: any free one.",
    ),
]
PortsOption = Annotated[
    str | None,
    typer.Option(
        "--ports",
        metavar="LOW-HIGH",
        help="Ports to test between all hosts; any free ones by default.",
    ),
]
FindingsAsJson = Annotated[
    bool,
    typer.Option(
        "--json", help="All results as JSON; its schema: `ortlaunch schema --output doctor`."
    ),
]
AllowOption = Annotated[
    list[str] | None,
    typer.Option(
        "--allow",
        metavar="NAME",
        help="Allow a change that is otherwise refused, as data or model.",
    ),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        "--dryrun",
        help=(
            "Print the command, and on standard error the plan, changes and refusals; start "
            "and write nothing."
        ),
    ),
]
LauncherOption = Annotated[
    str | None,
    typer.Option(
        "--launcher",
        help="auto, local, torchrun or mpi; the recipe's launch.launcher by default.",
    ),
]
RanksPerHostOption = Annotated[
    int | None,
    typer.Option(
        "--nproc-per-node",
        min=1,
        max=9999,
        help="Ranks on each host; one per GPU, or one, by default.",
    ),
]
HostfileOption = Annotated[
    str | None,
    typer.Option("--hostfile", "-H", help="Hosts and slots; DeepSpeed, Open MPI or MPICH style."),
]
IncludeOption = Annotated[
    str | None, typer.Option("--include", "-i", help="Hosts and slots to use: host1:0,1@host2.")
]
ExcludeOption = Annotated[
    str | None, typer.Option("--exclude", "-e", help="Hosts and slots to leave out.")
]


@contextlib.contextmanager
def exit_with_status_of_process() -> Iterator[None]:
    """Exit with the status of a process that has failed and printed why."""
    from ortlaunch.base.errors import RunError

    try:
        yield
    except RunError as error:
        raise typer.Exit(error.exit_status) from None


def parse_port_range(range_text: str | None) -> range | None:
    """Return the ports of `LOW-HIGH`; None for None.

    Raises:
        typer.BadParameter: the text is not a range of ports.
    """
    if range_text is None:
        return None
    first_port, _, last_port = range_text.partition("-")
    if not (
        first_port.isdecimal()
        and last_port.isdecimal()
        and 0 < int(first_port) <= int(last_port) <= 65535
    ):
        raise typer.BadParameter(
            f"got {range_text}; two ports from 1 to 65535, as 40000-50000", param_hint="--ports"
        )
    return range(int(first_port), int(last_port) + 1)


def launch_options_from_typed_values(
    launcher: str | None,
    nproc_per_node: int | None,
    hostfile: str | None,
    include: str | None,
    exclude: str | None,
) -> "LaunchOptions":
    """Return the values of the launch options of a verb.

    Raises:
        typer.BadParameter: `launcher` is a scheduler or no launcher.
    """
    # Imported here, as in all verbs: `--help` must not load the planning.
    from ortlaunch.planning.world import LaunchOptions

    if refusal := reason_launcher_is_refused(launcher):
        raise typer.BadParameter(refusal, param_hint="--launcher")
    # Only the command line reads it: commands.jsonl and the command that continues a run.
    return LaunchOptions(
        launcher, nproc_per_node, hostfile, include, exclude, typed=tuple(sys.argv)
    )
