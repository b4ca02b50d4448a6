"""The commands on a model's folder outside of a run, beside those of `Run`."""

from ortlaunch.commands import evaluate_model
from ortlaunch.commands.generate import generate_text_in_process
from ortlaunch.tables.tasks import GenerationRequest

__all__ = ["GenerationRequest", "evaluate_model", "generate_text_in_process"]
