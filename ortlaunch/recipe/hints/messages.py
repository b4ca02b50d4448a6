"""Messages about refused values: the value, the accepted ones and the usual cause."""

from __future__ import annotations

import re
from typing import Any

from pydantic_core import ErrorDetails

from ortlaunch.recipe.fields.field_lookup import (
    accepts_null,
    first_docstring_sentence_or_empty,
    is_required,
    names_accepted_by_field,
)
from ortlaunch.recipe.hints.keys_of_other_tools import NO_PREFERENCES, PREFERENCES
from ortlaunch.recipe.text.closest_names import (
    REMEDIES,
    closest_or_translated_name_or_none,
    normalize_word,
)
from ortlaunch.recipe.text.source_location import KeyPath, format_key_path
from ortlaunch.recipe.text.tree import Tree

# pydantic's types of errors -> the accepted type, for people who do not know Python.
_TYPE_NAMES = {
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
    ("model", "quantize"): "{type: nf4}",
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


def missing_key_message(key_path: KeyPath) -> str:
    """Return the message about a required key that is missing."""
    example = f", for example {key_path[-1]}: {EXAMPLES[key_path]}" if key_path in EXAMPLES else ""
    accepted_words = names_accepted_by_field(key_path)
    shows_words_alone = (
        len(accepted_words) > 1 and not example and key_path[-1] != "source"
    )  # which may be a mapping, too
    expectation = (
        f"one of {', '.join(accepted_words)}"
        if shows_words_alone
        else first_docstring_sentence_or_empty(key_path)
    )
    return "is missing" + (f": {expectation}" if expectation else "") + example


def wrong_value_message(
    key_path: KeyPath, error_details: ErrorDetails, value_node: Tree | None
) -> str:
    """Return the message about a value of the wrong type, or out of bounds."""
    if error_details["loc"][-1] == "[key]" and (
        accepted_keys := names_accepted_by_field(key_path[:-1])
    ):
        guess = _guess_text(closest_or_translated_name_or_none(str(key_path[-1]), accepted_keys))
        return f"unknown key; valid here: {', '.join(accepted_keys)}{guess}"
    raw_text = (value_node.raw if value_node else None) or str(error_details["input"])
    is_preference = key_path == ("model", "task") and normalize_word(raw_text) in PREFERENCES
    expectation = (
        NO_PREFERENCES
        if is_preference
        else _accepted_values_and_guess_text(key_path, error_details, raw_text)
    )
    return (
        f"got {_value_as_written_text(error_details, value_node)}; "
        f"{expectation}{_usual_mistake_sentence_or_empty(key_path, error_details, value_node)}"
    )


def _value_as_written_text(error_details: ErrorDetails, value_node: Tree | None) -> str:
    if value_node is None or value_node.node_type != "scalar":
        return _shorten_text(
            repr(value_node.value_without_locations() if value_node else error_details["input"])
        )
    if value_node.scalar is None:
        return "null" if value_node.raw else "nothing"
    # YAML 1.1 reads yes, no, on and off as booleans.
    if isinstance(value_node.scalar, bool) and (value_node.raw or "").lower() not in (
        "true",
        "false",
    ):
        return f"{value_node.raw}, which YAML reads as {str(value_node.scalar).lower()}"
    return _shorten_text(f'"{value_node.raw}"' if value_node.quoted else str(value_node.raw))


def _shorten_text(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 80 else text[:77] + "..."


def _accepted_values_and_guess_text(
    key_path: KeyPath, error_details: ErrorDetails, written_text: str
) -> str:
    error_type = error_details["type"]
    context = error_details.get("ctx", {})
    if key_path[:2] == ("data", "evaluation") and error_type == "extra_forbidden":
        return "it is of a corpus, and share and samples are of data.train; give one of both"
    if key_path in (("data", "train"), ("data", "evaluation")):
        other_forms = (
            ", or a list of {source, weight}" if key_path[-1] == "train" else ", or {share: 0.05}"
        )
        guess_note = _guess_text(
            closest_or_translated_name_or_none(written_text, names_accepted_by_field(key_path))
        )
        return f"it must be python-docs, python-chats, python-pairs or a mapping, as {_CORPUS}{other_forms}{guess_note}"
    if key_path == ("data", "tokenizer"):
        return f"it must be a folder, a hub id, or a mapping, as {EXAMPLES[key_path]}"
    if error_type == "literal_error":
        accepted_words = names_accepted_by_field(key_path)
        closest_word = (
            closest_or_translated_name_or_none(written_text, accepted_words)
            if len(accepted_words) > 1
            else None
        )
        remedy = REMEDIES.get((str(key_path[-1]), normalize_word(written_text)))
        return (
            "it must be "
            + " or ".join(filter(None, (", ".join(accepted_words[:-1]), accepted_words[-1])))
            + (f"; {remedy}" if remedy else _guess_text(closest_word))
        )
    if error_type in _BOUNDS:
        return f"it must be {_BOUNDS[error_type]} {next(iter(context.values()))}"
    if _TYPE_NAMES.get(error_type) == "a mapping" and written_text in names_accepted_by_field(
        (*key_path, "name")
    ):
        return (
            f"it must be a mapping, as {EXAMPLES[key_path]}; on the command line: "
            f"{format_key_path(key_path)}.name={written_text}"
        )
    if error_type in _TYPE_NAMES:
        expectation = (
            f", as {EXAMPLES[key_path]}"
            if key_path in EXAMPLES
            else f": {first_docstring_sentence_or_empty(key_path)}"
            if first_docstring_sentence_or_empty(key_path)
            else ""
        )
        accepted_words = (
            names_accepted_by_field(key_path) if "number" in _TYPE_NAMES[error_type] else ()
        )
        return (
            "it must be "
            f"{' or '.join((_TYPE_NAMES[error_type], *accepted_words))}{expectation}"
            f"{_guess_text(closest_or_translated_name_or_none(written_text, accepted_words))}"
        )
    if error_type in ("missing", "too_short", "too_long", "string_too_short"):
        if key_path in EXAMPLES:
            return f"write it as {EXAMPLES[key_path]}"
        if error_type == "too_long":
            return f"it must have at most {context['max_length']} values"
        return "it has too few values" if error_details["input"] else "it must not be empty"
    if error_type == "string_too_long":
        return f"it must have at most {context['max_length']} characters"
    if error_type == "string_pattern_mismatch":
        return _required_text_form_message(key_path)
    # An error without a message of its own here: pydantic's, in the form of the others.
    message: str = error_details["msg"]
    return message[0].lower() + message[1:]


def _required_text_form_message(key_path: KeyPath) -> str:
    if key_path == ("submit", "time"):
        return 'it must be a time of Slurm: minutes as "30", else "4:00:00" or "2-12:00:00"'
    if key_path == ("submit", "kubernetes", "namespace"):
        return (
            "it must be a name of Kubernetes: up to 63 of a-z, 0-9 and -, which it does not "
            "begin or end with"
        )
    if key_path[:2] == ("submit", "kubernetes") and key_path[-1] in (
        "cpu",
        "memory",
        "shared_memory",
    ):
        return "it must be a quantity of Kubernetes, as 96, 500m or 1000Gi"
    if key_path[:2] == ("submit", "kubernetes"):
        return "it must be a whole path, as /data/runs, without blanks, colons and commas"
    if key_path[-1] == "shared_memory":
        return "it must be a size of Docker, as 16g"
    return "use letters, digits, `.`, `_` and `-`, and begin with a letter or a digit"


def _guess_text(closest_name: str | None) -> str:
    return f"; did you mean {closest_name}?" if closest_name else ""


def _usual_mistake_sentence_or_empty(
    key_path: KeyPath, error_details: ErrorDetails, value_node: Tree | None
) -> str:
    """Return the usual mistake behind such a value, as a sentence of its own, or ""."""
    error_type = error_details["type"]
    value = value_node.scalar if value_node else None
    raw_text = (value_node.raw if value_node else None) or ""
    if value_node is None or value_node.node_type != "scalar":
        return ""
    if _TYPE_NAMES.get(error_type) == "a mapping" and re.match(r"\w+:\S", raw_text):
        return ". Put a space after the colon"
    if accepts_null(key_path) and (value is False or raw_text.lower() in ("none", "nil", "null")):
        return ". Write null for no value"
    if raw_text == "auto" and not is_required(key_path):
        return ". Leave the key out instead"
    if (
        error_type == "string_type"
        and isinstance(value, bool)
        and raw_text.lower() not in ("true", "false")
    ):
        return f'. Write "{raw_text}" in quotes if the word is meant'
    if error_type == "tuple_type" and raw_text.startswith("("):
        return ". Write a list in [ ]"
    if (
        error_type == "string_type"
        and key_path not in EXAMPLES
        and isinstance(value, (bool, int, float))
    ):
        return f'. Write "{raw_text}" in quotes'
    if error_type == "tuple_type" and isinstance(value, str) and key_path not in EXAMPLES:
        return f". Write [{raw_text}]"
    return _number_mistake_sentence_or_empty(error_details, value, value_node.quoted)


def _number_mistake_sentence_or_empty(
    error_details: ErrorDetails, scalar_value: Any, is_quoted: bool
) -> str:
    expected_type = _TYPE_NAMES.get(error_details["type"], "")
    if "number" not in expected_type and expected_type != "true or false":
        return ""
    if isinstance(scalar_value, float) and scalar_value.is_integer():
        return f". Write {scalar_value:.0f}"
    if not isinstance(scalar_value, str):
        return ""
    if is_quoted and (_is_number_text(scalar_value) or scalar_value.lower() in ("true", "false")):
        return ". Quotes make it text: omit the quotes"
    # yaml_text.py keeps such a value as text; YAML 1.1 would read it as octal.
    if re.fullmatch(r"[-+]?0[0-9]+", scalar_value):
        return f". Write {int(scalar_value)}, without the leading zero"
    if re.fullmatch(r"[0-9]{1,3}([, ][0-9]{3})+", scalar_value):
        return f". Write {re.sub('[, ]', '', scalar_value)}"
    # As 1k, 2M or 10%.
    is_scaled_number = re.fullmatch(r"([0-9.]+) ?([kKmMbBgG%])", scalar_value)
    return ". Write the number out" if is_scaled_number else ""


def _is_number_text(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
