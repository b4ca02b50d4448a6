"""Messages about refused values: the value, the accepted ones and the usual cause."""

from __future__ import annotations

import re
from typing import Any

from pydantic_core import ErrorDetails

from ortlaunch.recipe.fields.field_lookup import choices, description, is_required, takes_null
from ortlaunch.recipe.hints.keys_of_other_tools import NO_PREFERENCES, PREFERENCES
from ortlaunch.recipe.text.place import KeyPath, dotted
from ortlaunch.recipe.text.tree import Tree
from ortlaunch.recipe.text.words import REMEDIES, closest, normal

# pydantic's types of errors -> the accepted type, for people who do not know Python.
_KINDS = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "a word",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "tuple_type": "a list",
}
_BOUNDS = {
    "greater_than": ">",
    "greater_than_equal": ">=",
    "less_than": "<",
    "less_than_equal": "<=",
}
_CORPUS = "{format: text, path: [corpus/*.txt]}"
# Examples for sections, and for values whose form is not obvious.
EXAMPLES: dict[KeyPath, str] = {
    ("model",): "{task: masked-lm, pretrained: bert-base-uncased}",
    ("model", "config"): "{model_type: bert, hidden_size: 768}",
    ("model", "lora"): "{r: 8, alpha: 32, target_modules: [q_proj, v_proj]}",
    ("data",): "{train: python-docs, tokenizer: bert-base-uncased, sequence_length: 128}",
    ("data", "train"): _CORPUS,
    ("data", "evaluation"): _CORPUS,
    ("data", "tokenizer"): "{train: wordpiece, vocab_size: 30522}",
    ("data", "masked_lm"): "{probability: 0.15}",
    ("batch",): "{global_size: 256, micro_size: 32}",
    ("optimizer",): "{name: adamw, learning_rate: 1e-4}",
    ("optimizer", "betas"): "[0.9, 0.999]",
    ("schedule",): "{name: cosine, warmup_ratio: 0.1}",
    ("engine",): "{name: ort}",
    ("zero",): "{stage: 2}",
    ("train",): "{max_steps: 1000}",
    ("checkpoint",): "{every_steps: 500}",
    ("launch",): "{launcher: torchrun, processes_per_node: 8}",
    ("launch", "env"): "{NCCL_DEBUG: WARN}",
    ("submit",): '{partition: gpu, time: "4:00:00"}',
    ("submit", "time"): '"4:00:00"',
    ("submit", "container"): "{image: /images/train.sif, runtime: apptainer}",
    ("submit", "kubernetes"): "{image: repo/train:1, runs: /data/runs, volumes: {training: /data}}",
    ("submit", "kubernetes", "volumes"): "{training: /data}",
    ("submit", "kubernetes", "node_selector"): "{gpu: h100}",
    ("submit", "azureml"): "{compute: azureml:gpus, environment: azureml:ortlaunch@latest}",
    ("submit", "setup"): "[module load cuda/12.4]",
    ("log",): "{every_steps: 10}",
    ("log", "trackers"): "[tensorboard, wandb]",
    ("log", "profile_steps"): "[4, 9]",
}


def missing(path: KeyPath) -> str:
    """Return the message about a required key that is missing."""
    example = f", for example {path[-1]}: {EXAMPLES[path]}" if path in EXAMPLES else ""
    words = choices(path)
    alone = len(words) > 1 and not example and path[-1] != "source"  # which may be a mapping, too
    about = f"one of {', '.join(words)}" if alone else description(path)
    return "is missing" + (f": {about}" if about else "") + example


def wrong(path: KeyPath, details: ErrorDetails, written: Tree | None) -> str:
    """Return the message about a value of the wrong type, or out of bounds."""
    if details["loc"][-1] == "[key]" and (words := choices(path[:-1])):
        guess = _guess(closest(str(path[-1]), words))
        return f"unknown key; valid here: {', '.join(words)}{guess}"
    raw = (written.raw if written else None) or str(details["input"])
    is_preference = path == ("model", "task") and normal(raw) in PREFERENCES
    wanted = NO_PREFERENCES if is_preference else _wanted(path, details, raw)
    return f"got {_got(details, written)}; {wanted}{_cause(path, details, written)}"


def _got(details: ErrorDetails, written: Tree | None) -> str:
    if written is None or written.kind != "scalar":
        return _short(repr(written.plain() if written else details["input"]))
    if written.scalar is None:
        return "null" if written.raw else "nothing"
    # YAML 1.1 reads yes, no, on and off as booleans.
    if isinstance(written.scalar, bool) and (written.raw or "").lower() not in ("true", "false"):
        return f"{written.raw}, which YAML reads as {str(written.scalar).lower()}"
    return _short(f'"{written.raw}"' if written.quoted else str(written.raw))


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 80 else text[:77] + "..."


def _wanted(path: KeyPath, details: ErrorDetails, raw: str) -> str:
    kind = details["type"]
    context = details.get("ctx", {})
    if path[:2] == ("data", "evaluation") and kind == "extra_forbidden":
        return "it is of a corpus, and share and samples are of data.train; give one of both"
    if path in (("data", "train"), ("data", "evaluation")):
        lists = ", or a list of {source, weight}" if path[-1] == "train" else ", or {share: 0.05}"
        near = _guess(closest(raw, choices(path)))
        return f"it must be python-docs, python-chats or a mapping, as {_CORPUS}{lists}{near}"
    if path == ("data", "tokenizer"):
        return f"it must be a folder, a hub id, or a mapping, as {EXAMPLES[path]}"
    if kind == "literal_error":
        words = choices(path)
        guess = closest(raw, words) if len(words) > 1 else None
        remedy = REMEDIES.get((str(path[-1]), normal(raw)))
        return (
            "it must be "
            + " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))
            + (f"; {remedy}" if remedy else _guess(guess))
        )
    if kind in _BOUNDS:
        return f"it must be {_BOUNDS[kind]} {next(iter(context.values()))}"
    if _KINDS.get(kind) == "a mapping" and raw in choices((*path, "name")):
        return (
            f"it must be a mapping, as {EXAMPLES[path]}; on the command line: "
            f"{dotted(path)}.name={raw}"
        )
    if kind in _KINDS:
        about = (
            f", as {EXAMPLES[path]}"
            if path in EXAMPLES
            else f": {description(path)}"
            if description(path)
            else ""
        )
        words = choices(path) if "number" in _KINDS[kind] else ()
        return (
            f"it must be {' or '.join((_KINDS[kind], *words))}{about}{_guess(closest(raw, words))}"
        )
    if kind in ("missing", "too_short", "too_long", "string_too_short"):
        if path in EXAMPLES:
            return f"write it as {EXAMPLES[path]}"
        if kind == "too_long":
            return f"it must have at most {context['max_length']} values"
        return "it has too few values" if details["input"] else "it must not be empty"
    if kind == "string_too_long":
        return f"it must have at most {context['max_length']} characters"
    if kind == "string_pattern_mismatch":
        return _pattern(path)
    # An error without a message of its own here: pydantic's, in the form of the others.
    message: str = details["msg"]
    return message[0].lower() + message[1:]


def _pattern(path: KeyPath) -> str:
    """Return the form that a field's text must have."""
    if path == ("submit", "time"):
        return 'it must be a time of Slurm: minutes as "30", else "4:00:00" or "2-12:00:00"'
    if path == ("submit", "kubernetes", "namespace"):
        return (
            "it must be a name of Kubernetes: up to 63 of a-z, 0-9 and -, which it does not "
            "begin or end with"
        )
    if path[:2] == ("submit", "kubernetes") and path[-1] in ("cpu", "memory", "shared_memory"):
        return "it must be a quantity of Kubernetes, as 96, 500m or 1000Gi"
    if path[:2] == ("submit", "kubernetes"):
        return "it must be a whole path, as /data/runs, without blanks, colons and commas"
    if path[-1] == "shared_memory":
        return "it must be a size of Docker, as 16g"
    return "use letters, digits, `.`, `_` and `-`, and begin with a letter or a digit"


def _guess(guess: str | None) -> str:
    return f"; did you mean {guess}?" if guess else ""


def _cause(path: KeyPath, details: ErrorDetails, written: Tree | None) -> str:
    """Return the usual mistake behind such a value, as a sentence of its own, or ""."""
    kind = details["type"]
    value = written.scalar if written else None
    raw = (written.raw if written else None) or ""
    if written is None or written.kind != "scalar":
        return ""
    if _KINDS.get(kind) == "a mapping" and re.match(r"\w+:\S", raw):
        return ". Put a space after the colon"
    if takes_null(path) and (value is False or raw.lower() in ("none", "nil", "null")):
        return ". Write null for no value"
    if raw == "auto" and not is_required(path):
        return ". Leave the key out instead"
    if kind == "string_type" and isinstance(value, bool) and raw.lower() not in ("true", "false"):
        return f'. Write "{raw}" in quotes if the word is meant'
    if kind == "tuple_type" and raw.startswith("("):
        return ". Write a list in [ ]"
    if kind == "string_type" and path not in EXAMPLES and isinstance(value, (bool, int, float)):
        return f'. Write "{raw}" in quotes'
    if kind == "tuple_type" and isinstance(value, str) and path not in EXAMPLES:
        return f". Write [{raw}]"
    return _number(details, value, written.quoted)


def _number(details: ErrorDetails, value: Any, quoted: bool) -> str:
    wants = _KINDS.get(details["type"], "")
    if "number" not in wants and wants != "true or false":
        return ""
    if isinstance(value, float) and value.is_integer():
        return f". Write {value:.0f}"
    if not isinstance(value, str):
        return ""
    if quoted and (_is_number(value) or value.lower() in ("true", "false")):
        return ". Quotes make it text: omit the quotes"
    # yaml_text.py keeps such a value as text; YAML 1.1 would read it as octal.
    if re.fullmatch(r"[-+]?0[0-9]+", value):
        return f". Write {int(value)}, without the leading zero"
    if re.fullmatch(r"[0-9]{1,3}([, ][0-9]{3})+", value):
        return f". Write {re.sub('[, ]', '', value)}"
    # As 1k, 2M or 10%.
    scaled = re.fullmatch(r"([0-9.]+) ?([kKmMbBgG%])", value)
    return ". Write the number out" if scaled else ""


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
