"""`ortlaunch export --push`: the model card, the upload to a local hub, and early refusals."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import ModelCard, constants

from ortlaunch.api.export import ExportOptions, export_checkpoint_and_push_if_requested
from ortlaunch.base.errors import InputError, LaunchError, OrtlaunchError, RunError
from ortlaunch.recipe import dump_recipe_yaml
from ortlaunch.run_folder.engine_report import EngineChoice
from ortlaunch.run_folder.folder import RunDir, write_json_atomically, write_text_atomically
from ortlaunch.worker.export.export import write_transformers_or_peft_folder
from ortlaunch.worker.export.model_card import build_model_card
from ortlaunch.worker.export.push import (
    require_token_and_create_repository,
    write_missing_model_card_and_upload_to_existing_repository,
)
from ortmodule_tests.hub import Hub
from tests.makers import bert, engine_report, onnxruntime

# An evaluation at step 4, and training metrics after it.
LINES = (
    {"step": 4, "loss": 2.0, "samples": 8}, {"step": 4, "evaluation_loss": 1.5, "evaluation_masked_word_accuracy": 0.5},
    {"step": 9, "loss": 0.1, "samples": 18},
)  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Return the folder of a finished BERT training with an export of step 4."""
    run = RunDir(tmp_path / "run")
    corpus = {"format": "hub", "name": "wikitext", "subset": "v1"}
    data = {"train": corpus, "evaluation": corpus, "tokenizer": "here", "sequence_length": 64}
    model = {"task": "masked-lm", "pretrained": "google/bert"}
    # A secret, and a value that would end a Markdown fence.
    made = bert(data=data, model=model, launch={"env": {"MY_TOKEN": "secret", "FENCE": "```"}})
    write_text_atomically(run.recipe, dump_recipe_yaml(made))
    write_text_atomically(run.metrics, "".join(json.dumps(line) + "\n" for line in LINES))
    write_json_atomically(run.engine, engine_report("ort", onnxruntime=onnxruntime()).to_json())
    write_text_atomically(run.export_folder(4, "huggingface") / "model.safetensors", "weights")
    write_text_atomically(run.export_folder(4, "huggingface") / "config.json", "{}")
    return run


def test_the_card(run: RunDir) -> None:
    """The card has readable metadata, the checkpoint's metrics, and the recipe without secrets."""
    text = str(build_model_card(run, 4, "me/model", run.export_folder(4, "huggingface")))
    card = ModelCard(text)
    data = card.data.to_dict()
    assert (data["base_model"], data["datasets"], data["pipeline_tag"]) == (
        "google/bert",
        ["wikitext"],
        "fill-mask",
    )
    assert (data["library_name"], data["tags"]) == ("transformers", ["ortlaunch", "engine:ort"])
    assert {each.metric_type: each.metric_value for each in card.data.eval_results} == {  # type: ignore[attr-defined]
        "loss": 1.5,
        "masked_word_accuracy": 0.5,
    }
    assert "| samples | 8 |" in text
    # The fence is longer than the one in the recipe.
    assert "````yaml\n" in text
    assert "secret" not in text
    # A run that fell back has no passes of ONNX Runtime to count.
    assert "passes that fell back to PyTorch: 0" in text
    choice = EngineChoice("ort", "eager", "no such operator")
    write_json_atomically(run.engine, engine_report("ort", engine=choice).to_json())
    text = str(build_model_card(run, 4, "me/model", run.export_folder(4, "huggingface")))
    assert "engine: eager (asked: ort)" in text
    assert "passes that fell back" not in text


def test_an_upload(run: RunDir, hub: Hub, capfd: pytest.CaptureFixture[str]) -> None:
    """An upload creates a private repository with export and card, and never prints the token."""
    require_token_and_create_repository("me/model")
    said = write_missing_model_card_and_upload_to_existing_repository(
        "me/model", run, 4, run.export_folder(4, "huggingface")
    )
    assert (said.startswith(hub.address), hub.created[0]["name"], hub.created[0]["visibility"]) == (
        True,
        "model",
        "private",
    )
    assert sorted(hub.files) == ["README.md", "config.json", "model.safetensors"]
    assert (
        hub.files["model.safetensors"],
        b"base_model: google/bert" in hub.files["README.md"],
    ) == (b"weights", True)
    assert hub.tokens == {"Bearer hf_secret"}
    # The captured output is that of all file descriptors.
    assert "hf_secret" not in "".join(capfd.readouterr())


def test_an_export_that_is_there_is_uploaded(
    run: RunDir, hub: Hub, capfd: pytest.CaptureFixture[str]
) -> None:
    """The command uploads an existing export, and keeps the user's own card."""
    folder = run.export_folder(4, "huggingface")
    write_text_atomically(folder / "README.md", "mine")
    write_text_atomically(
        run.exports,
        json.dumps({"step": 4, "format": "huggingface", "folder": str(folder.absolute())}) + "\n",
    )
    write_text_atomically(run.plan, "{}")
    write_text_atomically(run.checkpoint_folder(4) / "COMPLETE", "")
    assert (
        export_checkpoint_and_push_if_requested(
            run, ExportOptions(push_target="me/model"), ("stdout", "stderr")
        )
        == folder
    )
    assert f"pushed: {hub.address}" in capfd.readouterr().out
    assert hub.files["README.md"] == b"mine"


def adapters(folder: Path) -> None:
    """Write an export of the adapters of a tiny BERT."""
    from peft import LoraConfig, get_peft_model
    from transformers import BertConfig, BertForMaskedLM

    sizes = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "intermediate_size": 8,
    }
    model = get_peft_model(
        BertForMaskedLM(BertConfig(vocab_size=16, **sizes)), LoraConfig(target_modules=["query"])
    )
    recipe = bert(
        model={"task": "masked-lm", "config": {"model_type": "bert"}, "lora": {"merge": False}}
    )
    trained: Any = SimpleNamespace(model=model, generates_with_cache=None)
    data: Any = SimpleNamespace(tokenizer=None)
    folder.mkdir(parents=True, exist_ok=True)
    write_transformers_or_peft_folder(recipe, folder, trained, data)


def test_an_upload_of_adapters(run: RunDir, hub: Hub) -> None:
    """The card of adapters is the run's, not peft's template, with the same metadata."""
    adapters(run.export_folder(9, "huggingface"))
    write_missing_model_card_and_upload_to_existing_repository(
        "me/model", run, 9, run.export_folder(9, "huggingface")
    )
    card = ModelCard(hub.files["README.md"].decode())
    data = card.data.to_dict()
    assert (data["base_model"], data["library_name"], data["pipeline_tag"]) == (
        "google/bert",
        "peft",
        "fill-mask",
    )
    assert "lora" in data["tags"]
    assert ("## Recipe" in card.text, "[More Information Needed]" in card.text) == (True, False)


def test_a_card_beside_adapters_is_left_alone(run: RunDir) -> None:
    """The user's own card beside adapters is kept."""
    # peft would write into it.
    folder = run.export_folder(9, "huggingface")
    write_text_atomically(folder / "README.md", "mine")
    adapters(folder)
    assert ((folder / "README.md").read_text(), (folder / "adapter_config.json").exists()) == (
        "mine",
        True,
    )


@pytest.mark.parametrize(
    ("change", "kind", "error"),
    [
        ({"HF_TOKEN": None}, InputError, "no token is set; export HF_TOKEN"),
        ({"offline": True}, InputError, "HF_HUB_OFFLINE is set"),
        ({"repo": "a b"}, InputError, "--push: Repo id must"),
        (
            {"refuses": 403},
            InputError,
            r"--push me/model: me/model may not be written \(no rights\), and the token "
            r"that is set gives no access: make one that may write \(http://",
        ),
        ({"address": "http://127.0.0.1:9"}, LaunchError, "http://127.0.0.1:9 cannot be reached"),
    ],
)
def test_what_is_refused_before_any_work(
    change: dict[str, Any],
    kind: type[OrtlaunchError],
    error: str,
    hub: Hub,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A missing token, network, name or right is refused; no message has the token."""
    if "HF_TOKEN" in change:
        monkeypatch.delenv("HF_TOKEN")
        # The machine may have a token of its own.
        monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", change.get("offline", False))
    monkeypatch.setattr(constants, "ENDPOINT", change.get("address", hub.address))
    hub.refuses = change.get("refuses", 0)
    with pytest.raises(kind, match=error) as raised:
        require_token_and_create_repository(change.get("repo", "me/model"))
    assert "hf_secret" not in str(raised.value)


def test_a_refusal_ends_the_command(
    hub: Hub, run: RunDir, capfd: pytest.CaptureFixture[str]
) -> None:
    """A refusal is an error with status 2 before an export is made, and nothing is printed."""
    hub.refuses = 401
    write_text_atomically(run.plan, "{}")
    write_text_atomically(run.checkpoint_folder(9) / "COMPLETE", "")
    with pytest.raises(RunError, match=r"^--push me/model:") as raised:
        export_checkpoint_and_push_if_requested(run, ExportOptions(push_target="me/model"))
    assert (raised.value.exit_status, capfd.readouterr()) == (2, ("", ""))
    assert not run.export_folder(9, "huggingface").exists()
