"""ORTTrainer in one process, beside transformers' Trainer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")
from transformers import (  # an extra
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    HfArgumentParser,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from ortmodule import ORTModuleError, Settings
from ortmodule._internal.base.counters import tally
from ortmodule.trainer import (
    ORTSeq2SeqTrainer,
    ORTSeq2SeqTrainingArguments,
    ORTTrainer,
    ORTTrainingArguments,
)
from ortmodule_tests.hub import Hub
from ortmodule_tests.ort import needs_ort
from ortmodule_tests.trainer import tiny
from ortmodule_tests.trainer.tiny import arguments, assert_close, made, trained

pytestmark = [needs_ort, pytest.mark.usefixtures("built")]


class Both:
    """One training by Trainer, and the same one by ORTTrainer."""

    def __init__(self, folder: Path, model: Any, **others: Any) -> None:
        stock = arguments(TrainingArguments, folder / "trainer", **others)
        self.trainer = trained(made(Trainer, model(), stock))
        ours = arguments(ORTTrainingArguments, folder / "ort", **others, optim="adamw_ort_fused")
        # The report counts the whole process, in which other tests have exported, too.
        before = tally.re_exports
        self.ort = trained(made(ORTTrainer, model(), ours))
        self.re_exports = tally.re_exports - before
        self.folder = folder / "ort"


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Both:
    """A BERT that both have trained."""
    return Both(tmp_path_factory.mktemp("bert"), tiny.bert)


@pytest.fixture(scope="module")
def language_model(tmp_path_factory: pytest.TempPathFactory) -> Both:
    """A Llama that both have trained."""
    return Both(tmp_path_factory.mktemp("llama"), tiny.llama)


@pytest.mark.parametrize("name", ["classifier", "language_model"])
def test_losses_are_trainers(name: str, request: pytest.FixtureRequest) -> None:
    """Losses of 20 steps, of evaluations and predictions are Trainer's; one graph trained."""
    both: Both = request.getfixturevalue(name)
    assert len(both.ort.losses) == tiny.STEPS
    assert_close(both.ort.losses, both.trainer.losses)
    assert_close(both.ort.evaluation, both.trainer.evaluation)
    rows = tiny.samples(both.ort.trainer.model, 4)
    ours, stock = (one.trainer.predict(rows).predictions for one in (both.ort, both.trainer))
    np.testing.assert_allclose(ours, stock, rtol=1e-4, atol=1e-5)
    report = both.ort.trainer.report()
    assert report["engine"] == "ort"
    assert report["onnxruntime"]["forward_passes"] == tiny.STEPS * 2
    assert both.re_exports == 0


@pytest.mark.parametrize(
    ("name", "auto"),
    [
        ("classifier", AutoModelForSequenceClassification),
        ("language_model", AutoModelForCausalLM),
    ],
)
def test_a_saved_model_is_plain(
    name: str, auto: Any, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Checkpoints, the best model and `save_model` load in transformers, with the same outputs."""
    both: Both = request.getfixturevalue(name)
    trainer = both.ort.trainer
    trainer.save_model(str(tmp_path))
    row = tiny.samples(trainer.model, 1)[0]["input_ids"][None]
    best = str(trainer.state.best_model_checkpoint)
    for folder in (str(tmp_path), best):
        loaded = auto.from_pretrained(folder).eval()
        with torch.no_grad():
            logits = [one(input_ids=row).logits for one in (loaded, trainer.model.eval())]
        torch.testing.assert_close(*logits)
    assert type(trainer.model).__name__ != "ORTModule"


def test_an_upload_is_the_plain_model(classifier: Both, hub: Hub, tmp_path: Path) -> None:
    """push_to_hub uploads files that load in transformers, with the trained weights."""
    trainer = classifier.ort.trainer
    trainer.push_to_hub()
    assert hub.created
    assert {"config.json", "model.safetensors", "README.md"} <= hub.files.keys()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes(hub.files[name])
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    torch.testing.assert_close(loaded.state_dict(), trainer.model.state_dict())


def test_training_resumes_in_the_middle(classifier: Both, tmp_path: Path) -> None:
    """A resumed training has the losses of the uninterrupted one, in either direction."""
    for kind, args, checkpoint in (
        (ORTTrainer, ORTTrainingArguments, classifier.folder / "checkpoint-10"),
        (Trainer, TrainingArguments, classifier.folder / "checkpoint-10"),
        (ORTTrainer, ORTTrainingArguments, classifier.folder.parent / "trainer/checkpoint-10"),
    ):
        trainer = made(kind, tiny.bert(), arguments(args, tmp_path))
        resumed = trained(trainer, str(checkpoint))
        assert_close(resumed.losses, classifier.trainer.losses)


def test_the_report_is_written(classifier: Both, capsys: pytest.CaptureFixture[str]) -> None:
    """ort_report.json is what `report` returns; it names the optimizer that really ran."""
    written = json.loads((classifier.folder / "ort_report.json").read_text())
    assert written["optimizer"] == {
        "requested": "adamw_ort_fused",
        "used": "torch.optim.adamw.AdamW",
        "why": "ONNX Runtime's is for CUDA only",
    }
    assert written["onnxruntime"]["fallbacks"] == 0
    assert written["onnxruntime"]["provider"] == "CPUExecutionProvider"
    assert any("adamw_ort_fused" in note for note in written["onnxruntime"]["notes"])


@pytest.mark.slow
@pytest.mark.ci
def test_generation_and_seq2seq(tmp_path: Path) -> None:
    """Seq2SeqTrainer's losses and generated tokens are the same, in ORTSeq2SeqTrainer."""
    results = []
    for name, kind, args in (
        ("stock", Seq2SeqTrainer, Seq2SeqTrainingArguments),
        ("ort", ORTSeq2SeqTrainer, ORTSeq2SeqTrainingArguments),
    ):
        given = arguments(args, tmp_path / name, predict_with_generate=True, max_steps=4)
        given.load_best_model_at_end = False
        result = trained(made(kind, tiny.t5(), given))
        rows = tiny.samples(result.trainer.model, 4)
        tokens: Any = result.trainer
        results.append((result.losses, tokens.predict(rows, max_length=6).predictions))
    assert_close(results[1][0], results[0][0])
    np.testing.assert_array_equal(results[1][1], results[0][1])


class Seen(TrainerCallback):
    """A callback that records the classes of the model that it is given."""

    def __init__(self) -> None:
        self.kinds: set[str] = set()

    def on_step_end(self, *args: Any, model: Any = None, **kwargs: Any) -> None:
        """Record the model's class."""
        self.kinds.add(type(model).__name__)


@pytest.mark.slow
@pytest.mark.ci
def test_a_loss_in_python_and_a_new_model_for_each_training(tmp_path: Path) -> None:
    """`compute_loss_func`, `model_init` and callbacks work; each new model has an ORTModule."""
    results = {}
    for kind, args in ((Trainer, TrainingArguments), (ORTTrainer, ORTTrainingArguments)):
        seen = Seen()
        given = arguments(
            args,
            tmp_path,
            max_steps=3,
            eval_strategy="no",
            save_strategy="no",
            load_best_model_at_end=False,
        )
        trainer: Any = kind(
            args=given,
            model_init=tiny.bert,
            train_dataset=tiny.samples(tiny.bert(), 8),
            callbacks=[seen],
            compute_loss_func=_doubled,
        )
        first = trained(trainer).losses
        module = getattr(trainer, "ort_module", None)
        results[kind] = first, trained(trainer).losses
        assert module is None or module is not trainer.ort_module
        assert seen.kinds == {"BertForSequenceClassification"}
    for ours, stock in zip(results[ORTTrainer], results[Trainer]):
        assert_close(ours, stock)


def _doubled(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    return 2 * torch.nn.functional.cross_entropy(outputs.logits, labels) / 2


@pytest.mark.slow
@pytest.mark.ci
def test_lora(tmp_path: Path) -> None:
    """A peft model trains as with Trainer, in the given settings; its adapter is saved."""
    peft = pytest.importorskip("peft")
    losses = []
    trainer: Any
    for name, kind, args, others in (
        ("stock", Trainer, TrainingArguments, {}),
        ("ort", ORTTrainer, ORTTrainingArguments, {"settings": Settings(threads=1)}),
    ):
        model = peft.get_peft_model(tiny.llama(), peft.LoraConfig(task_type="CAUSAL_LM", r=4))
        given = arguments(args, tmp_path / name, max_steps=4, eval_steps=2, save_steps=2)
        trainer = made(kind, model, given, **others)
        losses.append(trained(trainer).losses)
    assert_close(losses[1], losses[0])
    assert trainer.report()["onnxruntime"]["settings"] == {"threads": 1}
    loaded = peft.PeftModel.from_pretrained(tiny.llama(), str(tmp_path / "ort/checkpoint-4"))
    weights = peft.get_peft_model_state_dict(model), peft.get_peft_model_state_dict(loaded)
    torch.testing.assert_close(*weights)


def test_evaluation_has_the_precision_of_training(tmp_path: Path) -> None:
    """The plain model evaluates in autocast where the arguments have bf16."""
    seen = []
    model = tiny.bert()
    model.register_forward_pre_hook(lambda *_: seen.append(torch.is_autocast_enabled("cpu")))
    trainer = made(ORTTrainer, model, arguments(ORTTrainingArguments, tmp_path, bf16=True))
    # As after `train`, accelerate does not prepare the model again.
    trainer.accelerator._models.append(model)
    trainer.evaluate()
    assert seen == [True]


def test_arguments_of_optimum(tmp_path: Path) -> None:
    """Optimum's arguments are parsed from a command line and have an effect, or warn."""
    (args,) = HfArgumentParser(ORTTrainingArguments).parse_args_into_dataclasses(
        [
            "--output_dir", str(tmp_path), "--optim", "adamw_ort_fused", "--onnx_log_level", "INFO",
            "--save_onnx", "True", "--onnx_prefix", "mine", "--use_module_with_loss", "True",
            "--label_smoothing_factor", "0.1", "--report_to", "none", "--use_cpu",
        ]
    )  # fmt: skip
    assert args.optim == "adamw_ort_fused"
    with pytest.warns(UserWarning, match="label_smoothing_factor and compute_loss_func are comp"):
        trainer = ORTTrainer(tiny.bert(), args)
    settings = trainer._ortmodule_settings()
    assert (settings.log_level, settings.save_onnx) == ("info", str(tmp_path / "mine"))
    with (
        pytest.warns(UserWarning, match="feature='masked-lm' has no effect"),
        pytest.warns(UserWarning, match="label_smoothing_factor and compute_loss_func are comp"),
    ):
        ORTTrainer(tiny.bert(), args, feature="masked-lm")
    with pytest.warns(UserWarning, match="'adamw_hf': transformers has removed it"):
        assert ORTTrainingArguments(str(tmp_path), optim="adamw_hf").optim == "adamw_torch"
    with pytest.raises(
        ORTModuleError, match="onnx_log_level: got 'LOUD'; it must be one of VERBOSE"
    ):
        ORTTrainingArguments(str(tmp_path), onnx_log_level="LOUD")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("_n_gpu", 2, "DataParallel on several GPUs: start one process for each GPU"),
        ("is_fsdp_enabled", True, "FSDP: use DeepSpeed ZeRO 1 or 2"),
    ],
)
def test_other_parallelism_is_refused(
    name: str, value: object, message: str, tmp_path: Path
) -> None:
    """Trainings that ORTModule would not take part in are an error before the first step."""
    args = arguments(ORTTrainingArguments, tmp_path)
    trainer = made(ORTTrainer, tiny.bert(), args)
    setattr(args if name == "_n_gpu" else trainer, name, value)
    with pytest.raises(ORTModuleError, match=message):
        trainer.train()
