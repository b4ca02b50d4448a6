"""Test `ortlaunch import`: torchtune, accelerate, and LLaMA-Factory's second schema."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from ortlaunch.base.errors import InputError, RecipeError
from ortlaunch.importers import ImportedRecipe, convert_config_to_recipe
from tests.control.foreign import said

CONFIGS = Path(__file__).parents[2] / "foreign_configs"
SHIPPED = Path(__file__).parents[3] / "recipes"
ALPACA = {"format": "hub", "name": "yahma/alpaca-cleaned", "prompt": "alpaca", "train_on": "all"}
# Keys that make a whole config of torchtune.
TUNE: dict[str, Any] = {
    "checkpointer": {"checkpoint_dir": "here"},
    "metric_logger": {"_component_": "torchtune.training.metric_logging.DiskLogger"},
    "dataset": {"_component_": "torchtune.datasets.alpaca_dataset"},
    "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-4},
    "model": {"_component_": "torchtune.models.llama3.llama3_8b"},
    "batch_size": 2,
    "epochs": 2,
}


def made(found: ImportedRecipe) -> Any:
    """Return the values of an imported recipe."""
    return yaml.safe_load(found.recipe_yaml)


def test_torchtune() -> None:
    """Components become names, weights a folder, and splits of a data set two corpora."""
    found = convert_config_to_recipe(CONFIGS / "torchtune.yaml", None, None, ())
    recipe = made(found)
    assert (found.tool, found.import_report.dropped) == ("torchtune", [])
    assert recipe["model"]["lora"] == {
        "target_modules": ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        "r": 8,
        "alpha": 16,
        "dropout": 0.0,
        "merge": False,
    }
    assert recipe["data"]["train"] == {**ALPACA, "split": "train[:95%]"}
    assert recipe["data"]["evaluation"] == {**ALPACA, "split": "train[95%:]"}
    assert recipe["optimizer"] == {
        "name": "fused_adam",
        "learning_rate": 3e-4,
        "weight_decay": 0.01,
    }
    assert recipe["schedule"] == {"name": "cosine", "warmup_steps": 100}
    assert recipe["batch"] == {"micro_size": 2, "accumulation_steps": 8}
    assert (recipe["precision"], recipe["launch"]) == ("bf16", {"device": "cuda"})
    assert recipe["model"]["gradient_checkpointing"] is True
    assert "model's marks of a chat" in said(found, "changed")["dataset"]


def test_automodel() -> None:
    """Classes become names; columns and files of data sets become sources."""
    found = convert_config_to_recipe(CONFIGS / "automodel.yaml", None, None, ())
    recipe = made(found)
    assert found.tool == "automodel"
    rows = {"format": "jsonl", "prompt_column": "prompt", "response_column": "completion"}
    folder = "./sample-datasets/prompt_completion"
    assert recipe["data"]["train"] == {**rows, "path": f"{folder}/train.jsonl"}
    assert recipe["data"]["evaluation"] == {**rows, "path": f"{folder}/validation.jsonl"}
    assert recipe["model"]["lora"] == {
        "target_modules": ".*(.*_proj)", "r": 16, "alpha": 32, "dropout": 0.0
    }  # fmt: skip
    assert recipe["batch"] == {"global_size": 8, "micro_size": 1}
    assert recipe["train"]["evaluate_every_steps"] == 12
    assert recipe["schedule"] == {"name": "cosine"}
    assert recipe["parallel"] == {"replicate": 1}
    assert set(said(found, "dropped")) == {"model.backend", "parallelizer"}


def test_oumi() -> None:
    """Sections are read as Trainer's arguments; a known data set has its columns."""
    found = convert_config_to_recipe(CONFIGS / "oumi.yaml", None, None, ())
    recipe = made(found)
    assert found.tool == "oumi"
    assert recipe["data"]["train"] == {
        "format": "hub", "name": "yahma/alpaca-cleaned", "prompt_column": "instruction",
        "input_column": "input", "response_column": "output", "train_on": "all",
    }  # fmt: skip
    assert recipe["model"]["quantize"] == {"type": "nf4", "double": False}
    assert recipe["model"]["lora"]["r"] == 8
    assert recipe["parallel"] == {"shard": "auto", "blocks": ["LlamaDecoderLayer"]}
    assert recipe["optimizer"]["name"] == "fused_adam"
    assert set(said(found, "dropped")) == {"trust_remote_code"}


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"training": {"trainer_type": "TRL_DPO"}}, "no preference or reinforcement learning"),
        ({"training": {"output_dir": "a"}, "data": {"train": {"collator_name": "vision_language_sft"}}},
         "images beside text"),
        ({"step_scheduler": {"max_steps": 1}, "optimizer": {"lr": 1}}, "no dataset and no optimizer"),
        ({"step_scheduler": {"max_steps": 1}, "optimizer": {"lr": 1}, "dataset": {"_target_": "a"},
          "model": {"_target_": "NeMoAutoModelForSeq2SeqLM.from_pretrained"}}, "text alone is imported"),
    ],
)  # fmt: skip
def test_trainings_of_oumi_and_automodel_that_are_refused(
    tmp_path: Path, keys: dict[str, Any], text: str
) -> None:
    """Preferences, images and other models are refused by name."""
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(keys))
    with pytest.raises(InputError, match=text):
        convert_config_to_recipe(tmp_path / "a.yaml", None, None, ())


@pytest.mark.parametrize(
    ("keys", "where", "key", "text"),
    [
        ({"compile": True}, "taken", "compile", "engine.name: inductor"),
        ({"enable_activation_offloading": True}, "taken", "enable_activation_offloading", "offload"),
        ({"fsdp_cpu_offload": True}, "taken", "fsdp_cpu_offload", "parallel.offload: True"),
        ({"custom_sharded_layers": ["output"]}, "changed", "custom_sharded_layers", "in no layer"),
        ({"data_parallel_shard_dim": -1}, "taken", "data_parallel_shard_dim", "parallel.replicate: 1"),
        ({"data_parallel_replicate_dim": 2, "data_parallel_shard_dim": -1}, "needless",
         "data_parallel_shard_dim", "parallel has it"),
        ({"max_steps_per_epoch": 5}, "taken", "max_steps_per_epoch", "train.max_steps: 10"),
        ({"tensor_parallel_dim": 2}, "taken", "tensor_parallel_dim", "parallel.tensor"),
        ({"tensor_parallel_dim": 2, "tensor_parallel_plan": {"_component_": "a"}}, "needless",
         "tensor_parallel_plan", "transformers' plan"),
        ({"tensor_parallel_dim": 1, "tensor_parallel_plan": {"_component_": "a"}}, "needless",
         "tensor_parallel_plan", "is 1"),
        ({"fsdp": {"cpu_offload": True}}, "taken", "fsdp.cpu_offload", "parallel.offload"),
        ({"fsdp": {"cpu_offload": False}}, "taken", "fsdp", "parallel.replicate: 1"),
        ({"quantizer": {"_component_": "a"}}, "dropped", "quantizer", "quantized weights"),
        ({"profiler": {"enabled": True}}, "dropped", "profiler", "log.profile_steps"),
        ({"optimizer": {"_component_": "torch.optim.Adagrad"}}, "changed",
         "optimizer._component_", "another optimizer"),
        ({"optimizer": {"_component_": "bitsandbytes.optim.PagedAdamW8bit", "lr": 1}}, "changed",
         "optimizer._component_", "adamw_8bit; with its state not paged"),
        ({"lr_scheduler": {"_component_": "a.get_linear"}}, "changed", "lr_scheduler._component_",
         "another schedule"),
        ({"tokenizer": {"max_seq_len": 512, "x": 1}}, "dropped", "tokenizer.x", "no counterpart"),
        ({"dataset": {"_component_": "torchtune.datasets.text_completion_dataset", "source": "a/b",
                      "packed": True, "data_files": "a.txt", "column": "x"}},
         "dropped", "dataset.column", "no counterpart"),
        ({"model": {"_component_": "a.qlora_b", "lora_attn_modules": ["q_proj"]}}, "changed",
         "model._component_", "model.quantize: {type: nf4}"),
        ({"metric_logger": {"_component_": "a.WandBLogger", "project": "p"}}, "taken",
         "metric_logger.project", "log.project"),
        ({"checkpointer": {"checkpoint_dir": "here", "keep_last_n_checkpoints": 2}}, "taken",
         "checkpointer.keep_last_n_checkpoints", "checkpoint.keep"),
    ],
)  # fmt: skip
def test_torchtunes_own_ways(
    keys: dict[str, Any], where: str, key: str, text: str, tmp_path: Path
) -> None:
    """Each key of torchtune is reported in the list to which it belongs."""
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({**TUNE, **keys}))
    lora = ["model.lora.r=8"] if "lora_attn_modules" in keys.get("model", {}) else []
    found = convert_config_to_recipe(
        tmp_path / "c.yaml", None, None, ("optimizer.learning_rate=1e-4", *lora)
    )
    assert text in said(found, where)[key]


def test_every_nested_key_is_accounted_for() -> None:
    """Each key of a section is in one list of the report, by its path."""
    path = CONFIGS / "torchtune.yaml"
    report = convert_config_to_recipe(path, None, None, ()).import_report
    lists = (report.taken, report.changed, report.dropped, report.needless)
    reported = {*report.empty, *(remark.key for remarks in lists for remark in remarks)}
    sections = {"checkpointer", "model", "tokenizer", "optimizer", "lr_scheduler", "metric_logger"}
    nested = {
        f"{section}.{key}"
        for section, keys in yaml.safe_load(path.read_text()).items()
        if section in sections
        for key in keys
    }
    # Names of components whose arguments are all reported.
    silent = {"model._component_", "tokenizer._component_", "metric_logger._component_"}
    assert nested - reported - silent == set()


@pytest.mark.parametrize(
    ("tool", "keys", "list_name"),
    [
        ("accelerate", {"num_machines": 0.5, "num_processes": 2}, "taken"),
        ("accelerate", {"mixed_precision": "no"}, "needless"),
        ("hf-trainer", {"optim": "OptimizerNames.ADAMW_TORCH"}, "taken"),
        ("deepspeed", {"optimizer": "Adam"}, "dropped"),
        ("accelerate", {"deepspeed_config": ["a"]}, "dropped"),
    ],
)
def test_unusual_values(tool: str, keys: dict[str, Any], list_name: str, tmp_path: Path) -> None:
    """Half a machine, the word for no narrow precision, an enum's form and other types are in the report."""
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(keys))
    base = SHIPPED / "llama2-7b/tiny.yaml"
    overrides = ("launch.nodes=1", "batch={global_size: 4, micro_size: 1}")
    found = convert_config_to_recipe(tmp_path / "c.yaml", tool, base, overrides)
    assert [*keys][-1] in said(found, list_name)


@pytest.mark.parametrize(
    ("tool", "keys", "error"),
    [
        ("axolotl", {"base_model": "a", "adapter": "lora", "lora_target_modules": 1},
         "model.lora.target_modules: got 1"),
        ("hf-trainer", {"packing": True, "dataset_mixture": 1}, "data.train"),
    ],
)  # fmt: skip
def test_values_of_another_type(
    tool: str, keys: dict[str, Any], error: str, tmp_path: Path
) -> None:
    """A value that is no list where the tool has one is an error of the recipe's field."""
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(keys))
    with pytest.raises(RecipeError, match=error):
        convert_config_to_recipe(tmp_path / "c.yaml", tool, None, ())


def test_accelerate() -> None:
    """Processes, hosts, ZeRO and precision of accelerate replace those of a base recipe."""
    overrides = ("batch.global_size=64", "batch.micro_size=1")
    base = SHIPPED / "llama2-7b/tiny.yaml"
    found = convert_config_to_recipe(CONFIGS / "accelerate.yaml", None, base, overrides)
    recipe = made(found)
    assert (found.tool, found.import_report.dropped) == ("accelerate", [])
    assert recipe["launch"]["nodes"] == 2
    assert recipe["launch"]["processes_per_node"] == 4
    assert (recipe["precision"], recipe["engine"]["name"]) == ("bf16", "eager")
    assert recipe["zero"]["stage"] == 3
    assert recipe["zero"]["offload"] == {"parameters": "cpu"}


def test_mesh_of_accelerate(tmp_path: Path) -> None:
    """FSDP2 with a mesh takes the place of the base's ZeRO; other axes are said by name."""
    sizes = {"dp_replicate_size": 2, "dp_shard_size": 2, "tp_size": 2, "cp_size": 2, "sp_size": 1}
    (tmp_path / "c.yaml").write_text(
        yaml.safe_dump(
            {
                "distributed_type": "FSDP",
                "fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": True},
                "parallelism_config": {f"parallelism_config_{k}": v for k, v in sizes.items()},
            }
        )
    )
    # Of its engine ort only eager's settings stay.
    base = SHIPPED / "llama2-7b/pretrain.yaml"
    found = convert_config_to_recipe(tmp_path / "c.yaml", None, base, ())
    assert "zero" not in made(found)
    assert made(found)["engine"] == {"name": "eager"}
    assert made(found)["parallel"] == {"replicate": 2, "shard": 2, "tensor": 2}
    assert said(found, "dropped").keys() == {"parallelism_config.parallelism_config_cp_size"}


def test_llama_factorys_second_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sections become the first schema's keys, and its file of data sets their sources."""
    monkeypatch.chdir(CONFIGS)
    found = convert_config_to_recipe(CONFIGS / "llama_factory_v1.yaml", None, None, ())
    recipe = made(found)
    assert found.tool == "llama-factory"
    assert said(found, "dropped").keys() == {"kernel_config"}
    assert recipe["model"]["lora"] == {
        "r": 16,
        "alpha": 32,
        "dropout": 0.05,
        "target_modules": ["all-linear"],
    }
    assert (recipe["parallel"], recipe["engine"]) == ({"replicate": 1}, {"name": "eager"})
    assert (recipe["precision"], recipe["schedule"]) == ("bf16", {"name": "constant"})
    first, second = (part["source"] for part in recipe["data"]["train"])
    assert first == {
        "format": "jsonl",
        "path": "data/identity.json",
        "prompt_column": "instruction",
        "input_column": "input",
        "response_column": "output",
    }
    assert (second["name"], second["split"], second["most_rows"]) == ("owner/chats", "test", 500)
    assert (second["messages_column"], second.get("role_key", "role")) == ("messages", "role")


def test_muon_of_the_second_schema(tmp_path: Path) -> None:
    """Muon's usual values need no key, and tensors that it updates whole are not sharded."""
    muon = {"name": "muon", "wd": 0.1, "momentum": 0.95, "ns_steps": 6, "adamw_betas": [0.9, 0.95]}
    keys = {"model": "a", "model_class": "llm", "dist_config": {"name": "fsdp2"},
            "optim_config": muon, "max_steps": 9}  # fmt: skip
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(keys))
    found = convert_config_to_recipe(tmp_path / "c.yaml", None, None, ("data.train=python-chats",))
    assert made(found)["optimizer"] == {
        "name": "muon",
        "betas": [0.9, 0.95],
        "weight_decay": 0.1,
        "learning_rate": 1e-4,
    }
    assert "parallel" not in made(found)
    assert "without parallel" in said(found, "changed")["optimizer"]
    assert said(found, "dropped").keys() == {"optim_config.ns_steps"}
    assert "optim_config.momentum" in said(found, "needless")


def test_images_of_llama_factory(tmp_path: Path) -> None:
    """Data whose rows have images is refused: without them its answers have no meaning."""
    (tmp_path / "dataset_info.json").write_text(
        '{"pictures": {"file_name": "a.json", "columns": {"images": "images"}}}'
    )
    keys = {"model_name_or_path": "a", "stage": "sft", "dataset": "pictures", "dataset_dir": "."}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(keys))
    with pytest.raises(InputError, match="dataset: the rows of pictures have images: beside"):
        convert_config_to_recipe(tmp_path / "c.yaml", None, None, ())


@pytest.mark.parametrize(
    ("keys", "error"),
    [
        ({**TUNE, "teacher_model": {"a": 1}}, "teacher_model: .*no distillation"),
        ({**TUNE, "ref_checkpointer": {"a": 1}}, "no preference training"),
        ({**TUNE, "loss": {"_component_": "torchtune.rlhf.loss.DPOLoss"}}, "no preference training"),
        ({**TUNE, "model": {"_component_": "a.llama3_2_vision_11b"}}, "images beside text"),
        ({**TUNE, "dataset": {"_component_": "a.gsm8k_dataset"}}, "its component is none of alpaca"),
        ({"checkpointer": {"a": 1}}, "describes no training"),
        ({"model_name_or_path": "a", "export_dir": "b"}, "export_dir: b: the config describes no"),
        ({"stage": "sft", "finetuning_type": "lora", "do_predict": True}, "describes no training"),
        ({"base_model": "a", "processor_type": "AutoProcessor"}, "images and sound beside text"),
        ({"base_model": "a", "reward_model": True}, "no preference training"),
    ],
)  # fmt: skip
def test_what_is_refused(keys: dict[str, Any], error: str, tmp_path: Path) -> None:
    """Trainings that ortlaunch does not have, and configs of no training, are refused by name."""
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(keys))
    with pytest.raises(InputError, match=error):
        convert_config_to_recipe(tmp_path / "c.yaml", None, None, ())


@pytest.mark.parametrize(
    ("keys", "fields"),
    [
        ({"conversation_style": "openai", "train_on_input": True}, {"train_on": "all"}),
        ({"conversation_style": "sharegpt", "train_on_input": False},
         {"role_key": "from", "content_key": "value", "roles": {"human": "user", "gpt": "assistant"}}),
    ],
)  # fmt: skip
def test_torchtunes_chats(keys: dict[str, Any], fields: dict[str, Any], tmp_path: Path) -> None:
    """Column, style and loss of a chat data set become fields of the source."""
    component = "torchtune.datasets.chat_dataset"
    rows = {"_component_": component, "source": "a/b", "conversation_column": "talk", **keys}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({**TUNE, "dataset": rows}))
    found = convert_config_to_recipe(
        tmp_path / "c.yaml", None, None, ("optimizer.learning_rate=1e-4",)
    )
    source = {"format": "hub", "name": "a/b", "messages_column": "talk", **fields}
    assert yaml.safe_load(found.recipe_yaml)["data"]["train"] == source
    assert not [remark for remark in found.import_report.dropped if "dataset" in remark.key]
