"""The command line: one file for each verb or family of verbs, which converts arguments and calls
one function.

A new verb is a function in a file of its own and an entry in VERBS. Heavy modules are imported
inside the verbs, so that `--help` stays fast.
"""

# No `from __future__ import annotations` in this folder: Typer reads the annotations themselves.
import gc
import os
import sys
from itertools import filterfalse
from typing import Annotated

import typer

from ortlaunch.base.errors import HostfileError, InputError, OrtlaunchError, RecipeError
from ortlaunch.base.file_errors import one_line_file_error_or_none
from ortlaunch.base.output import output_columns, tolerate_lost_output_streams_within_block
from ortlaunch.base.units import wrap_long_lines_except_commands
from ortlaunch.cli.cluster import doctor, ranks, submit
from ortlaunch.cli.hints import Verb, Verbs
from ortlaunch.cli.results import device, evaluate, export, generate
from ortlaunch.cli.runs import diagnose, logs, report, status
from ortlaunch.cli.runs.list import list_runs
from ortlaunch.cli.setup import import_config, recipes, schema, setup, shipped
from ortlaunch.cli.summaries import SUMMARIES
from ortlaunch.cli.training import bench, data, parity, plan, sweep, train, validate

# The option for the output folder, if it is not --run-dir; error messages suggest it.
_FOLDER_OPTIONS = {
    "bench": "--out",
    "import": "--to",
    "report": "--to",
}
# In the order of the life of a run; `--help` sorts them by SUMMARIES.
VERBS = (
    validate.validate,
    import_config.import_config,
    plan.plan,
    train.train,
    parity.parity,
    bench.bench,
    submit.submit,
    status.status,
    status.compare,
    status.stop,
    status.checkpoint,
    status.restart,
    status.cancel,
    logs.logs,
    list_runs,
    evaluate.evaluate,
    export.export,
    generate.generate,
    diagnose.diagnose,
    report.report,
    doctor.doctor,
    ranks.ranks,
    setup.setup,
    schema.schema,
    shipped.constraints,
    shipped.hostfile,
    shipped.docs,
)

app = typer.Typer(
    name="ortlaunch",
    cls=Verbs,
    help="Train PyTorch models on ONNX Runtime from one recipe, from a laptop to a cluster.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
# Function names that cannot be the verb: a builtin and a keyword of Python.
NAMES = {"list_runs": "list", "import_config": "import"}
for verb in VERBS:
    name = NAMES.get(verb.__name__, verb.__name__)
    app.command(name, cls=Verb, short_help=SUMMARIES[name].text, epilog=SUMMARIES[name].example)(
        verb
    )
for name, family in (
    ("recipes", recipes.app),
    ("data", data.app),
    ("device", device.app),
    ("sweep", sweep.app),
):
    app.add_typer(
        family, name=name, short_help=SUMMARIES[name].text, epilog=SUMMARIES[name].example
    )


# The option is eager: it works without a verb, which is otherwise required.
def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        from ortlaunch.version import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Options of the command itself."""


def main() -> None:
    """Run the command line; errors for the user are printed without a traceback."""
    # With the freeze below, it saves a tenth of the time of a short command.
    gc.disable()
    with tolerate_lost_output_streams_within_block():
        try:
            _refuse_undecodable_arguments(sys.argv[1:])
            sys.argv[1:] = filterfalse(_is_local_rank_argument, sys.argv[1:])
            app(prog_name="ortlaunch")
        # Printed without a prefix: their lines begin with file:line:column, for editors.
        except (RecipeError, HostfileError) as error:
            sys.exit(_print_error_and_return_exit_status(str(error), error))
        except OrtlaunchError as error:
            sys.exit(_print_error_and_return_exit_status(f"ortlaunch: {error}", error))
        except OSError as error:
            input_error = one_line_file_error_or_none(
                error, _FOLDER_OPTIONS.get("".join(sys.argv[1:2]), "--run-dir")
            )
            # An unknown error is a bug, so its traceback is needed.
            if input_error is None:
                raise
            sys.exit(_print_error_and_return_exit_status(f"ortlaunch: {input_error}", input_error))
        finally:
            # Then the interpreter's last collections have no objects to visit.
            gc.freeze()


def _print_error_and_return_exit_status(message: str, error: OrtlaunchError) -> int:
    # A process of this command may have printed the message itself; the error's own is then empty.
    if str(error):
        # In a pipe or a file an error is one line, for editors and scripts.
        print(
            wrap_long_lines_except_commands(message, output_columns())
            if sys.stderr.isatty()
            else message,
            file=sys.stderr,
        )
    return error.exit_status


def _is_local_rank_argument(argument: str) -> bool:
    """Return whether a word is the local rank that DeepSpeed's launcher, or torch's old one, adds."""
    # It says the same as the variable, and may come before the verb.
    option_name, _, value = argument.replace("_", "-").partition("=")
    return option_name == "--local-rank" and value == os.environ.get("LOCAL_RANK")


def _refuse_undecodable_arguments(arguments: list[str]) -> None:
    """Check that every argument is valid text in the shell's encoding.

    Raises:
        InputError: Python could not decode an argument.
    """
    # Such an argument could not be written into the run folder. Python replaces each undecodable
    # byte with a lone surrogate from U+DC80 to U+DCFF.
    for argument in arguments:
        if not argument.isascii() and any(
            "\udc80" <= character <= "\udcff" for character in argument
        ):
            raise InputError(
                f"{argument!a} is not text in this shell's encoding "
                f"({sys.getfilesystemencoding()}); give it in UTF-8, "
                "with LC_ALL=C.UTF-8 or PYTHONUTF8=1 in the environment"
            )
