"""One recipe, one command: train a PyTorch model on ONNX Runtime from a laptop to a cluster.

The names of `__all__` are the public Python API (docs/reference/python.md). Each is imported at its first
use, so that `import ortlaunch` takes no time; importing none of them loads torch.
"""

from ortlaunch.version import __version__

# As typing.TYPE_CHECKING, without the import of typing.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from ortlaunch.api.data import show_data
    from ortlaunch.api.inputs import Validation, load, validate
    from ortlaunch.api.plan import fitting_worlds, plan
    from ortlaunch.api.protocols import (
        CheckpointHook,
        Collate,
        DataFactory,
        Dataset,
        EvaluationHook,
        Hook,
        Metric,
        ModelFactory,
        StepHook,
    )
    from ortlaunch.api.runs import Run, runs
    from ortlaunch.api.submit import submit
    from ortlaunch.api.sweep import Sweep, sweep
    from ortlaunch.api.train import train
    from ortlaunch.launch_plan import Plan
    from ortlaunch.planning.world import LaunchOptions
    from ortlaunch.recipe import Recipe
    from ortlaunch.resolve.resume import ResumeOptions
    from ortlaunch.search.study import Trial
    from ortlaunch.started_runs.diagnosis import Diagnosis
    from ortlaunch.started_runs.requests import StopResult
    from ortlaunch.started_runs.status import Status

__all__ = [
    "CheckpointHook",
    "Collate",
    "DataFactory",
    "Dataset",
    "Diagnosis",
    "EvaluationHook",
    "Hook",
    "LaunchOptions",
    "Metric",
    "ModelFactory",
    "Plan",
    "Recipe",
    "ResumeOptions",
    "Run",
    "Status",
    "StepHook",
    "StopResult",
    "Sweep",
    "Trial",
    "Validation",
    "__version__",
    "fitting_worlds",
    "load",
    "plan",
    "runs",
    "show_data",
    "submit",
    "sweep",
    "train",
    "validate",
]

_MODULES = {
    "api.data": ("show_data",),
    "api.inputs": ("Validation", "load", "validate"),
    "api.plan": ("fitting_worlds", "plan"),
    "api.protocols": (
        "CheckpointHook",
        "Collate",
        "DataFactory",
        "Dataset",
        "EvaluationHook",
        "Hook",
        "Metric",
        "ModelFactory",
        "StepHook",
    ),
    "api.runs": ("Run", "runs"),
    "api.submit": ("submit",),
    "api.sweep": ("Sweep", "sweep"),
    "api.train": ("train",),
    "started_runs.diagnosis": ("Diagnosis",),
    "launch_plan": ("Plan",),
    "started_runs.requests": ("StopResult",),
    "started_runs.status": ("Status",),
    "planning.world": ("LaunchOptions",),
    "recipe": ("Recipe",),
    "resolve.resume": ("ResumeOptions",),
    "search.study": ("Trial",),
}


# Hidden from type checkers, which would accept any name otherwise.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        from importlib import import_module

        for module, names in _MODULES.items():
            if name in names:
                return getattr(import_module(f"ortlaunch.{module}"), name)
        raise AttributeError(f"module 'ortlaunch' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
