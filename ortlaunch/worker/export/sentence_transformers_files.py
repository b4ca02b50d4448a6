"""The files by which sentence-transformers loads a folder of transformers, for tasks with several texts.

Module names and keys are those of its releases 2 to 6.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ortlaunch.recipe import Recipe
from ortlaunch.recipe.fields.compared_texts import Embedding

_MODULES = {
    "": "sentence_transformers.models.Transformer",
    "1_Pooling": "sentence_transformers.models.Pooling",
    "2_Normalize": "sentence_transformers.models.Normalize",
}
_POOLING_KEYS = {
    "mean": "pooling_mode_mean_tokens",
    "cls": "pooling_mode_cls_token",
    "last": "pooling_mode_lasttoken",
}


def write_sentence_transformers_files(recipe: Recipe, export_folder: Path, model: Any) -> None:
    """Write the files beside the weights, or adapters alone; nothing for other tasks."""
    settings = recipe.model.text_comparison
    if settings is None:
        return
    if not isinstance(settings, Embedding):
        # CrossEncoder loads a classifier of transformers; scores of these losses are no logits.
        config_path = export_folder / "config.json"
        # Adapters alone have none.
        if settings.loss in ("mse", "margin-mse") and config_path.exists():
            config = json.loads(config_path.read_text())
            activation = {"activation_fn": "torch.nn.modules.linear.Identity"}
            _write_json(config_path, {**config, "sentence_transformers": activation})
        return
    paths = [path for path in _MODULES if path != "2_Normalize" or settings.normalize]
    _write_json(
        export_folder / "modules.json",
        [
            {"idx": index, "name": str(index), "path": path, "type": _MODULES[path]}
            for index, path in enumerate(paths)
        ],
    )
    for path in paths[1:]:
        (export_folder / path).mkdir(exist_ok=True)
    _write_json(
        export_folder / "1_Pooling" / "config.json",
        {
            "word_embedding_dimension": model.config.hidden_size,
            **{key: name == settings.pooling for name, key in _POOLING_KEYS.items()},
            "include_prompt": True,
        },
    )
    if settings.normalize:
        # git and object stores do not keep an empty folder.
        _write_json(export_folder / "2_Normalize" / "config.json", {})
    _write_json(
        export_folder / "sentence_bert_config.json",
        {"max_seq_length": recipe.data.sequence_length, "do_lower_case": False},
    )
    _write_json(
        export_folder / "config_sentence_transformers.json",
        {
            "prompts": {
                "query": settings.query_prompt or "",
                "document": settings.document_prompt or "",
            },
            "default_prompt_name": None,
            "similarity_fn_name": "cosine",
        },
    )


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
