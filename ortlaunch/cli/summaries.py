"""All verbs of `ortlaunch --help`: their group, a summary within 80 columns, and an example."""

from typing import NamedTuple


class VerbSummary(NamedTuple):
    """A verb in the list of `ortlaunch --help`; the example is the last line of its own help."""

    group: str
    text: str
    example: str


# In the order of --help: group -> verb -> (summary, arguments of the example).
_GROUPS = {
    "Train": {
        "train": (
            "Train a recipe, or continue a run.",
            "my.yaml train.max_steps=100 --nproc-per-node 2",
        ),
        "validate": ("Check a recipe; all errors at once.", "my.yaml"),
        "plan": ("Show ranks, batch, memory and the command; run nothing.", "my.yaml zero.stage=2"),
        "sweep": ("Search fields of a recipe; each trial is a run.", "my.yaml"),
        "parity": ("Compare a recipe's engine with plain PyTorch.", "my.yaml --steps 3"),
        "bench": ("Compare the speed of engines and settings.", "my.yaml"),
        "data": ("Prepare or inspect a recipe's data.", "show my.yaml"),
    },
    "Runs": {
        "list": ("List your runs, the newest first.", ""),
        "status": ("Show state, last step, loss and speed of a run.", "latest"),
        "compare": ("Print what differs between two runs.", "runs/a runs/b"),
        "logs": ("Print a rank's output.", "latest --follow"),
        "report": ("Write an HTML page of runs.", "runs/bert-tiny-20261123-171950"),
        "diagnose": ("Explain why a run failed.", "latest"),
        "stop": ("Save a checkpoint, then end the run.", "latest"),
        "checkpoint": ("Save a checkpoint; the run continues.", "latest"),
        "restart": ("Save a checkpoint, then restart an elastic run.", "latest"),
        "cancel": ("End a run with all its processes.", "latest"),
    },
    "Result": {
        "evaluate": ("Compute the metrics of a checkpoint or a model.", "latest"),
        "export": ("Write a checkpoint in another format.", "latest --format onnx"),
        "generate": ("Continue a prompt with a causal model.", 'latest "The cat"'),
        "device": ("Train on devices, and average the results.", "train artifacts"),
    },
    "Cluster": {
        "submit": (
            "Queue a recipe: Slurm, Kubernetes, Azure ML.",
            "my.yaml launch.nodes=2 --dry-run",
        ),
        "doctor": ("Check this machine or hosts before a run.", "--hostfile hosts"),
        "ranks": ("Show which rank this process is.", ""),
        "hostfile": ("Print an example of a host file.", "> hosts"),
    },
    "Setup": {
        "setup": ("Build the torch extensions of engine ort, once.", ""),
        "recipes": ("List, show and copy the shipped recipes.", "copy llama2-7b/tiny my.yaml"),
        "import": (
            "Convert another tool's config into a recipe.",
            "args.json data.train=python-docs",
        ),
        "docs": ("Print a page of the documentation.", "engines"),
        "schema": ("Print the recipe's JSON schema.", "> schema.json"),
        "constraints": ("Print a tested set of versions for pip.", "> constraints.txt"),
    },
}
SUMMARIES = {
    verb: VerbSummary(group, text, f"Example: ortlaunch {verb} {example}".rstrip())
    for group, verbs in _GROUPS.items()
    for verb, (text, example) in verbs.items()
}
