"""ORTModule on the installed torch: eager's losses and gradients, honest counts, no fallback, every repair needed."""

from __future__ import annotations

import copy
import gc
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from ortlaunch import extensions
from ortlaunch.cache import cache_root
from ortlaunch.errors import MissingDependency
from ortlaunch.recipe.engine import Engine
from ortlaunch.worker.ort import compat, patching
from ortlaunch.worker.ort.witness import Witness
from ortlaunch.worker.ort.wrap import wrap

INSTALLED = bool(extensions.versions(extensions.EXTRA_OF))
needs_ort = pytest.mark.skipif(not INSTALLED, reason='needs onnxruntime-training: pip install "ortlaunch[ort-cpu]"')
STEPS = 6


@pytest.fixture(scope="module")
def built() -> None:
    """The extensions, built once per stack by the command that `ortlaunch setup` runs."""
    if not extensions.is_built():
        subprocess.run([sys.executable, "-m", extensions.__name__], check=True, timeout=280)


@pytest.fixture(scope="module")
def installed_witness(built: None) -> Witness:
    witness = Witness()
    witness.install()
    return witness


@pytest.fixture
def witness(installed_witness: Witness) -> Witness:
    """One witness for all tests, set to zero before each."""
    installed_witness.reset()
    return installed_witness


class Loss(nn.Module):
    """A transformers model as the worker wraps it: a batch in, the loss tensor out."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        return self.model(**batch).loss


class Layers(nn.Module):
    """Two layers with a scalar output."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x))).square().mean()


class Reverse(torch.autograd.Function):
    """A function whose backward is not the derivative of its forward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return -gradient


class Reversed(nn.Module):
    """A model with such a function in it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Reverse.apply(self.linear(x)).sum()


class Checkpointed(Layers):
    """Reentrant gradient checkpointing, which the exporter cannot trace."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.utils.checkpoint.checkpoint(self.first, x, use_reentrant=True)
        return self.second(torch.relu(hidden)).square().mean()


class Unexportable(nn.Module):
    """An operator that the exporter does not know, so that ORT falls back where it may."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.diff(self.linear(x), dim=0).sum()


def tiny(family: str, attention: str) -> Loss:
    """A two-layer BERT or Llama with random weights."""
    import transformers

    sizes = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64}
    sizes.update(num_attention_heads=4, max_position_embeddings=32)
    if family == "bert":
        config = transformers.BertConfig(**sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        kind = transformers.AutoModelForMaskedLM
    else:
        config = transformers.LlamaConfig(**sizes, num_key_value_heads=2)
        kind = transformers.AutoModelForCausalLM
    config.use_cache = False
    torch.manual_seed(0)
    return Loss(kind.from_config(config, attn_implementation=attention))


def batches() -> Iterator[dict[str, torch.Tensor]]:
    """Batches that change shape and padding after the first, from which ORT exports its graph."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(2, 16, 0), (2, 16, 4), (3, 12, 2), (1, 8, 0), (2, 16, 6), (4, 10, 1)]
    for rows, length, padding in shapes[:STEPS]:
        ids = torch.randint(0, 99, (rows, length), generator=generator)
        mask = torch.ones_like(ids)
        mask[0, length - padding :] = 0
        labels = torch.where(mask == 1, ids, torch.full_like(ids, -100))
        yield {"input_ids": ids, "attention_mask": mask, "labels": labels}


def trained(model: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of the steps, and the first step's gradients."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, gradients = [], {}
    for batch in batches():
        loss = model(**batch)
        loss.backward()
        gradients = gradients or {name: p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, gradients


def wrapped(module: nn.Module, threads: int = 1, allow_fallback: bool = False, **settings: Any) -> Any:
    return wrap(module, Engine(**settings), threads=threads, allow_fallback=allow_fallback)


def graph_gradients(module: Any) -> list[str]:
    """Names of the gradients that ORT's training graph computes."""
    graph = module._torch_module._execution_manager(True)._onnx_models.optimized_model.graph
    return sorted(output.name.replace("_original_module.", "").replace("_grad", "") for output in graph.output)


# ------------------------------------------------------------------------------------------- it trains like eager


@needs_ort
@pytest.mark.parametrize(
    ("family", "attention"), [("bert", "eager"), ("bert", "sdpa"), ("llama", "sdpa"), ("llama", "eager")]
)
def test_training_equals_eager(witness: Witness, family: str, attention: str) -> None:
    """Six AdamW steps give eager's losses, the first step eager's gradients, and every pass is ORT's."""
    model = tiny(family, attention)
    losses, gradients = trained(copy.deepcopy(model))

    ort_losses, ort_gradients = trained(wrapped(model))

    assert ort_losses == pytest.approx(losses, rel=1e-5)
    assert ort_gradients.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(ort_gradients[name], gradient, rtol=1e-4, atol=1e-6, msg=name)
    assert (witness.forward_passes, witness.backward_passes, witness.fallbacks) == (STEPS, STEPS, 0)
    assert witness.inference_passes == 0


@needs_ort
def test_evaluation_is_counted_apart(witness: Witness) -> None:
    """A pass in eval mode is an inference pass and gives eager's value."""
    model = Layers()
    x = torch.randn(4, 8)
    expected = model(x).item()

    evaluated = wrapped(model).eval()

    assert evaluated(x).item() == pytest.approx(expected, rel=1e-5)
    assert (witness.inference_passes, witness.forward_passes, witness.backward_passes) == (1, 0, 0)


@needs_ort
@pytest.mark.parametrize("level", [1, 2])
def test_recomputation_gives_the_same_gradients(witness: Witness, level: int) -> None:
    """Memory optimization changes what is kept, not what comes out."""
    model = tiny("llama", "sdpa")
    eager = copy.deepcopy(model)
    batch = next(batches())

    module = wrapped(model, memory_optimization=level)
    module(**batch).backward()
    eager(**batch).backward()

    assert module._torch_module._execution_manager(True)._runtime_options.memory_optimization_level == level
    for ours, theirs in zip(model.parameters(), eager.parameters()):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)


@needs_ort
def test_gradient_checkpointing_becomes_recomputation(witness: Witness) -> None:
    """At level 1 ORT's own recomputation takes the place of torch.utils.checkpoint in the export."""
    model = Checkpointed()
    eager = copy.deepcopy(model)
    x = torch.randn(4, 8, requires_grad=True)

    wrapped(model, memory_optimization=1)(x).backward()
    eager(x).backward()

    torch.testing.assert_close(model.first.weight.grad, eager.first.weight.grad)
    assert (witness.forward_passes, witness.fallbacks) == (1, 0)


# ---------------------------------------------------------------------------------------- what it cannot is loud


@needs_ort
def test_what_cannot_be_exported_raises(witness: Witness) -> None:
    """A model that ORT cannot take ends with an error, not in plain PyTorch."""
    with pytest.raises(Exception, match="aten::diff"):
        wrapped(Unexportable())(torch.randn(4, 8))
    assert (witness.forward_passes, witness.fallbacks) == (0, 0)


@needs_ort
def test_no_fallback_by_default(witness: Witness) -> None:
    """What ORT would by itself run as plain PyTorch is an error."""
    with pytest.raises(Exception, match="diff"):
        wrapped(Unexportable())(torch.randn(4, 8))
    assert witness.fallbacks == 0


@needs_ort
def test_an_allowed_fallback_is_counted_with_its_reason(witness: Witness) -> None:
    """Allowed, a fallback runs; the witness has each of them, and each reason once."""
    module = wrapped(Unexportable(), allow_fallback=True)
    for _ in range(2):
        module(torch.randn(4, 8)).backward()
    assert (witness.forward_passes, witness.fallbacks) == (0, 2)
    assert len(witness.fallback_reasons) == 1
    assert "aten::diff" in witness.fallback_reasons[0]


@needs_ort
def test_a_custom_backward_is_called_or_refused(witness: Witness) -> None:
    """ORT never replaces a custom backward by the derivative of its forward."""
    model = Reversed()
    x = torch.ones(2, 4)
    module = wrapped(model)
    if "stand_in_for_interop" in patching.applied():
        with pytest.raises(Exception, match="Couldn't export Python operator Reverse"):
            module(x)
    else:
        module(x).backward()
        assert model.linear.weight.grad.tolist() == [[-2.0] * 4]


# ----------------------------------------------------------------------------------------------- what wrap sets


@needs_ort
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads in /proc")
@pytest.mark.parametrize("threads", [1, 3])
def test_sessions_have_the_threads_asked_for(witness: Witness, threads: int) -> None:
    """Each of the two sessions starts the threads asked for, the caller's own being one of them."""
    module = wrapped(Layers(), threads=threads)
    x = torch.randn(4, 8)
    gc.collect()
    before = len(os.listdir("/proc/self/task"))
    module(x).backward()
    assert len(os.listdir("/proc/self/task")) - before == threads - 1
    module.eval()(x)
    assert len(os.listdir("/proc/self/task")) - before == 2 * (threads - 1)


@needs_ort
def test_frozen_parameters_have_no_gradient_in_the_graph(witness: Witness) -> None:
    """ORT computes gradients of what is trained; unfreezing a parameter later builds the graph again."""
    model = Layers()
    model.first.requires_grad_(False)
    module = wrapped(model)
    x = torch.randn(4, 8)

    module(x).backward()
    assert graph_gradients(module) == ["second.bias", "second.weight"]
    assert model.first.weight.grad is None

    model.first.requires_grad_(True)
    eager = copy.deepcopy(model)
    model.zero_grad()
    eager.zero_grad()
    module(x).backward()
    eager(x).backward()
    assert graph_gradients(module) == ["first.bias", "first.weight", "second.bias", "second.weight"]
    torch.testing.assert_close(model.first.weight.grad, eager.first.weight.grad)


@needs_ort
def test_settings_hold_for_one_module_and_leave_the_environment_alone(witness: Witness) -> None:
    """Two modules in one process keep their own settings."""
    before = dict(os.environ)
    plain, special = wrapped(Layers()), wrapped(Layers(), opset=18, memory_optimization=1)
    x = torch.randn(4, 8)
    plain(x).backward()
    special(x).backward()
    assert dict(os.environ) == before
    options = [module._torch_module._execution_manager(True)._runtime_options for module in (plain, special)]
    assert [(o.onnx_opset_version, int(o.memory_optimization_level)) for o in options] == [(17, 0), (18, 1)]


@needs_ort
def test_wrapping_and_training_print_nothing(witness: Witness, capfd: pytest.CaptureFixture[str]) -> None:
    """ORT's table of features and the exporter's warnings stay away at the default level."""
    model = tiny("llama", "sdpa")
    capfd.readouterr()
    wrapped(model)(**next(batches())).backward()
    assert capfd.readouterr() == ("", "")


# ------------------------------------------------------------------------------------------- each repair is needed

ONE_STEP = """
import sys, warnings
skipped, first = sys.argv[1], sys.argv[2:]
for name in first:
    __import__(name)
import torch
from ortlaunch.worker.ort import compat, patching
from ortlaunch.recipe.engine import Engine
from ortlaunch.worker.ort.wrap import wrap

def kept(repairs):
    return tuple(repair for repair in repairs if repair.__name__ != skipped)

export, push = torch.onnx.export, torch.cuda.nvtx.range_push
compat._BEFORE_IMPORT, compat._AFTER_IMPORT = kept(compat._BEFORE_IMPORT), kept(compat._AFTER_IMPORT)
compat.import_ortmodule()

class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1.0
    @staticmethod
    def backward(ctx, gradient):
        return -gradient

class Model(torch.nn.Module):
    def __init__(self, custom):
        super().__init__()
        self.linear, self.custom = torch.nn.Linear(4, 1), custom
    def forward(self, x):
        y = self.linear(x)
        assert bool(y.numel()), "asked of a tensor, to provoke a TracerWarning"
        return (Reverse.apply(y) if self.custom else y).sum()

def gradient(custom):
    model = Model(custom)
    wrap(model, Engine(), threads=1)(torch.ones(2, 4)).backward()
    return model.linear.weight.grad.tolist()[0]

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    assert gradient(custom=False) == [2.0] * 4
noise = [str(w.message) for w in caught if w.category.__name__ in ("TracerWarning", "DeprecationWarning")]
assert not noise, "warnings of the export: " + noise[0]
class FewLabels(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.loss = torch.nn.Linear(4, 3), torch.nn.CrossEntropyLoss()
    def forward(self, x, labels):
        return self.loss(self.linear(x), labels)

labels = torch.full((40,), -100)
labels[:2] = 1
wrap(FewLabels(), Engine(), threads=1)(torch.ones(40, 4), labels).backward()
try:
    convolution = wrap(torch.nn.Conv2d(1, 1, 3), Engine(), threads=1)
    convolution(torch.ones(1, 1, 4, 4)).sum().backward()
except Exception as error:
    raise SystemExit(f"a convolution: {error}")
from ortlaunch import extensions
refusal = extensions.interop_refusal()
try:
    assert gradient(custom=True) == [-2.0] * 4, "a custom backward was replaced"
except Exception as error:
    if not refusal or "Couldn't export Python operator" not in str(error):
        raise
    assert refusal in str(error), "the refusal has no reason"
class Masked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, mask):
        assert mask.dtype == torch.bool, "a mask became uint8"
        return x * mask
    @staticmethod
    def backward(ctx, gradient):
        return gradient, None

class Mask(Model):
    def forward(self, x):
        return Masked.apply(self.linear(x), x[:, :1] > 0).sum()
class Attention(torch.nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(4, 2, dropout=dropout, batch_first=True)
    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0].sum()

for dropout in (0.0, 0.5):
    wrap(Attention(dropout), Engine(), threads=1)(torch.ones(2, 3, 4)).backward()
if not refusal:
    wrap(Mask(True), Engine(), threads=1)(torch.ones(2, 4)).backward()
assert torch.onnx.export is export and torch.cuda.nvtx.range_push is push, "torch was changed"
print("applied:", *patching.applied())
"""

WITHOUT = {
    "alias_moved_exporter_modules": "does not import",
    "load_cached_extensions": "extensions were not detected",
    "stand_in_for_interop": "torch_interop_utils",
    "export_with_torchscript": "exporting the PyTorch model to ONNX",
    "refuse_custom_backward": "a custom backward was replaced",
    "skip_sparsity_hooks": "Couldn't export Python operator",
    "keep_boolean_arguments": "a mask became uint8",
    "export_multihead_attention": "assert is_literal",
    "export_attention_dropout": "gradient_builder_base.h",
    "quiet_ort_export": "warnings of the export",
    "restore_convolution_symbolics": "a convolution: ",
    "skip_nvtx_without_cuda": "NVTX functions not installed",
}


# What takes the place of custom autograd functions where their extension cannot be built.
REFUSING = ("stand_in_for_interop", "refuse_custom_backward", "skip_sparsity_hooks")


def one_step(cache: Path, skipped: str, *first: str) -> subprocess.CompletedProcess[str]:
    """A fresh process that imports `first`, then ORTModule without one of the repairs, and takes a step."""
    command = [sys.executable, "-c", ONE_STEP, skipped, *first]
    environment = {**os.environ, "ORTLAUNCH_CACHE": str(cache)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="module")
def refusing(built: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache in which torch_interop_utils could not be built."""
    here = extensions.cache_dir()
    cache = tmp_path_factory.mktemp("refusing")
    folder = cache / here.relative_to(cache_root())
    folder.mkdir(parents=True)
    for file in here.glob("*.so"):
        if file.stem != extensions.INTEROP:
            (folder / file.name).symlink_to(file)
    (folder / f"{extensions.INTEROP}.refused").write_text("the compiler says no")
    return cache


def applied(cache: Path) -> list[str]:
    """What is applied on this stack, where `import onnxruntime` came first and failed half-way: the worst case."""
    done = one_step(cache, "nothing", "onnxruntime")
    assert done.returncode == 0, done.stderr
    return done.stdout.split("applied:")[1].split()


@pytest.fixture(scope="module")
def repairs(refusing: Path) -> dict[str, Path]:
    """Every repair in force on this stack, and a cache with which it is."""
    with_interop, without = applied(cache_root()), applied(refusing)
    assert set(REFUSING) <= set(without)
    assert extensions.interop_refusal() or not set(REFUSING) & set(with_interop)
    return {**dict.fromkeys(without, refusing), **dict.fromkeys(with_interop, cache_root())}


@needs_ort
@pytest.mark.parametrize("repair", list(WITHOUT))
def test_each_repair_is_needed_where_it_is_applied(repairs: dict[str, Path], repair: str) -> None:
    """Without any one of the repairs in force, one step of a tiny model fails as that repair says."""
    if repair not in repairs:
        pytest.skip(f"not needed on torch {torch.__version__}")
    done = one_step(repairs[repair], repair)
    assert done.returncode != 0
    assert WITHOUT[repair] in done.stderr


@needs_ort
def test_every_repair_is_tested(built: None) -> None:
    """A repair that is added gets its line above."""
    assert {r.__name__ for r in (*compat._BEFORE_IMPORT, *compat._AFTER_IMPORT)} == WITHOUT.keys()


@needs_ort
def test_importing_twice_repairs_once(witness: Witness) -> None:
    """The second call returns the same module and applies nothing more."""
    before = patching.applied()
    assert compat.import_ortmodule() is compat.import_ortmodule()
    assert patching.applied() == before
    assert len(set(before)) == len(before)


# --------------------------------------------------------------------------------- what is missing, and what to type


def installed(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    """Let exactly these packages be installed."""
    found = {name.replace("_", "-"): version for name, version in versions.items()}
    monkeypatch.setattr(extensions, "version", found.get)


@pytest.mark.parametrize(
    ("packages", "message"),
    [
        ({}, 'pip install "ortlaunch\\[ort-cpu\\]"'),
        ({"onnxruntime": "1.27.0"}, 'pip install "ortlaunch\\[ort-cpu\\]"'),
        ({"onnxruntime_training_cpu": "1.18.0"}, "1.18.0 is installed. Type: pip install"),
        (
            {"onnxruntime_training_cpu": "1.19.2", "onnxruntime": "1.20.1"},
            "pip uninstall -y onnxruntime-training-cpu onnxruntime && pip install .*ort-cpu",
        ),
        (
            {"onnxruntime_training_cpu": "1.19.2", "onnxruntime_training": "1.19.2"},
            "onnxruntime-training-cpu 1.19.2 and onnxruntime-training 1.19.2 are installed together",
        ),
    ],
)
def test_wrong_packages_say_what_to_type(
    monkeypatch: pytest.MonkeyPatch, packages: dict[str, str], message: str
) -> None:
    """No wheel, the wrong version, or two wheels of one module."""
    monkeypatch.setattr(sys, "version_info", (3, 11, 7, "final", 0))
    installed(monkeypatch, torch="2.13.0", **packages)
    with pytest.raises(MissingDependency, match=message):
        extensions.missing()


def test_python_312_has_no_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.12 and later get told which Pythons work."""
    monkeypatch.setattr(sys, "version_info", (3, 12, 1, "final", 0))
    installed(monkeypatch, torch="2.13.0")
    with pytest.raises(MissingDependency, match=r"this is Python 3\.12\. Use Python 3\.9-3\.11"):
        extensions.missing()


@needs_ort
def test_an_extension_that_does_not_load_says_how_to_build_it_again(built: None, tmp_path: Path) -> None:
    """A damaged file in the cache is not a traceback from inside ORT."""
    environment = {**os.environ, "ORTLAUNCH_CACHE": str(tmp_path)}
    damage = (
        "from ortlaunch import extensions as e; from ortlaunch.worker.ort import compat; "
        "e.cache_dir().mkdir(parents=True); [(e.cache_dir() / f'{n}.so').write_text('') for n in e.wanted()]; "
        "compat.import_ortmodule()"
    )
    done = subprocess.run(
        [sys.executable, "-c", damage], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert "MissingDependency: the built extension does not load" in done.stderr
    assert f"rm -r '{tmp_path}" in done.stderr


def test_torch_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """No torch at all."""
    installed(monkeypatch, onnxruntime_training_cpu="1.19.2")
    with pytest.raises(MissingDependency, match="torch is not installed"):
        extensions.missing()


def test_a_refused_extension_is_not_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where torch_interop_utils could not be built the rest works; setup tries it again, and says why."""
    monkeypatch.setenv("ORTLAUNCH_CACHE", str(tmp_path))
    installed(monkeypatch, torch="2.99.0", onnxruntime_training_cpu="1.19.2")
    assert extensions.missing() == ["aten_op_executor", extensions.INTEROP]
    folder = extensions.cache_dir()
    folder.mkdir(parents=True)
    (folder / "aten_op_executor.so").write_text("")
    (folder / f"{extensions.INTEROP}.refused").write_text("no such symbol")
    assert extensions.is_built()
    assert extensions.interop_refusal() == "no such symbol"
    monkeypatch.setattr(extensions, "_require_tools", lambda: None)
    monkeypatch.setattr(extensions, "_compile", lambda names, folder: (folder / f"{names[0]}.so").write_text(""))
    assert extensions.build() == [extensions.INTEROP]
    assert not extensions.interop_refusal()


@needs_ort
def test_unknown_sources_are_not_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A source without the text that is to be replaced is refused by file and text, and the rest is still built."""
    package = tmp_path / "onnxruntime"
    source = next(extensions._package("onnxruntime").glob(f"training/ortmodule/*/cpu/{extensions.INTEROP}"))
    copied = package / source.relative_to(extensions._package("onnxruntime"))
    shutil.copytree(source, copied)
    code = copied / "custom_function_fw.cc"
    code.write_text(code.read_text().replace("py_fn->cdata.lock()", "py_fn->cdata"))
    monkeypatch.setattr(extensions, "_package", lambda name: package)
    extensions._compile([extensions.INTEROP], tmp_path)
    refusal = (tmp_path / f"{extensions.INTEROP}.refused").read_text()
    assert "custom_function_fw.cc has 0 times, instead of once: 'auto saved_for" in refusal
    assert list(tmp_path.glob("*.so")) == []


@needs_ort
@pytest.mark.slow
def test_unchanged_sources_do_not_build_on_newer_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without the changes torch_interop_utils is refused from torch 2.7 on, so that they are needed."""
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 7):
        pytest.skip("torch 2.6 and older take it as it is")
    monkeypatch.setitem(extensions.extension_sources._CHANGES, extensions.INTEROP, {})
    extensions._compile([extensions.INTEROP], tmp_path)
    assert "error" in (tmp_path / f"{extensions.INTEROP}.refused").read_text().lower()


def test_a_cuda_build_wants_the_cuda_extensions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With CUDA builds of both, ORT's allocator and FusedAdam's kernels are built as well, as install.py does."""
    (tmp_path / "capi").mkdir()
    (tmp_path / "version.py").write_text("debug = False\ncuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n")
    (tmp_path / "capi" / "build_and_package_info.py").write_text("package_name = 'x'\ncuda_version = '12.2'\n")
    installed(monkeypatch, torch="2.10.0", onnxruntime_training="1.19.2")
    monkeypatch.setattr(extensions, "_package", lambda name: tmp_path)
    assert extensions.wanted() == ["aten_op_executor", "torch_interop_utils", "torch_gpu_allocator", "fused_ops"]
    environment = extensions._build_environment()
    assert environment["ONNXRUNTIME_CUDA_VERSION"] == "12.2"
    assert environment["ONNXRUNTIME_ROCM_VERSION"] == ""
    assert environment["ONNXRUNTIME_CUDA_NVCC_EXTRA_ARGS"] == "-lineinfo,-O3,--use_fast_math,--threads,0"


def test_each_stack_has_its_own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Another torch, even another build of one version, never meets the wrong extension."""
    monkeypatch.setenv("ORTLAUNCH_CACHE", str(tmp_path))
    folders = set()
    for version in ("2.13.0+cpu", "2.13.0", "2.6.0"):
        installed(monkeypatch, torch=version, onnxruntime_training_cpu="1.19.2")
        folders.add(extensions.cache_dir())
    assert len(folders) == 3
    assert {folder.parent for folder in folders} == {tmp_path / "extensions"}


@needs_ort
def test_unbuilt_extensions_say_setup(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty cache is one command away from working."""
    monkeypatch.setenv("ORTLAUNCH_CACHE", str(tmp_path))
    with pytest.raises(MissingDependency, match=r"aten_op_executor.* Type: ortlaunch setup"):
        compat.import_ortmodule.__wrapped__()


@needs_ort
def test_missing_tools_are_all_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No compiler and no ninja: both are named at once."""
    monkeypatch.setenv("ORTLAUNCH_CACHE", str(tmp_path))
    monkeypatch.setattr(extensions, "_search_path", lambda: str(tmp_path))
    with pytest.raises(MissingDependency, match=r"a C\+\+ compiler .*ninja .* Then type: ortlaunch setup"):
        extensions.build()


@needs_ort
def test_an_unwritable_cache_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A cache that cannot be made says where it should have been."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ORTLAUNCH_CACHE", str(tmp_path / "file"))
    with pytest.raises(MissingDependency, match="Set ORTLAUNCH_CACHE to a folder you can write"):
        extensions.build()


@needs_ort
def test_a_failed_compilation_shows_its_end_and_leaves_nothing(tmp_path: Path) -> None:
    """The compiler's last lines, a non-zero status, no temporary folder and no half extension."""
    compiler = tmp_path / "c++"
    # torch asks it for its version first, and must get an answer.
    compiler.write_text('#!/bin/sh\ncase "$*" in *" -c "*) echo the compiler says no; exit 1;; esac\nexec c++ "$@"\n')
    compiler.chmod(0o755)
    temporary, cache = tmp_path / "temporary", tmp_path / "cache"
    temporary.mkdir()
    environment = {**os.environ, "CXX": str(compiler), "TMPDIR": str(temporary), "ORTLAUNCH_CACHE": str(cache)}
    done = subprocess.run(
        [sys.executable, "-m", extensions.__name__],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert "building aten_op_executor for torch" in done.stderr
    assert "the compiler says no" in done.stderr
    assert list(temporary.iterdir()) == []
    assert list(cache.rglob("*.so")) == []


@needs_ort
def test_two_builders_take_turns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The second builder of one cache waits for the first and finds its work done."""
    compiled: list[list[str]] = []
    entered = threading.Barrier(2)
    unlocked = extensions._require_tools

    def compile_slowly(names: list[str], folder: Path) -> None:
        compiled.append(names)
        for name in names:
            (folder / f"{name}.so").write_text("")

    def meet() -> None:
        unlocked()
        entered.wait(10)

    monkeypatch.setenv("ORTLAUNCH_CACHE", str(tmp_path))
    monkeypatch.setattr(extensions, "_compile", compile_slowly)
    monkeypatch.setattr(extensions, "_require_tools", meet)
    builders = [threading.Thread(target=extensions.build) for _ in range(2)]
    for builder in builders:
        builder.start()
    for builder in builders:
        builder.join()
    assert [names for names in compiled if names] == [extensions.wanted()]


@needs_ort
def test_asking_imports_nothing_heavy() -> None:
    """The control side may ask what is missing without paying for torch."""
    code = (
        f"import sys, {extensions.__name__} as e; e.missing(); "
        "print([m for m in ('torch', 'onnxruntime', 'transformers', 'deepspeed') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_environment_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """A with-block's variables are gone after it, and overwritten ones are back, whatever happens in it."""
    monkeypatch.setenv("ORTLAUNCH_TEST_A", "before")
    monkeypatch.delenv("ORTLAUNCH_TEST_B", raising=False)

    def fail() -> None:
        with patching.environment(ORTLAUNCH_TEST_A="during", ORTLAUNCH_TEST_B="during"):
            assert (os.environ["ORTLAUNCH_TEST_A"], os.environ["ORTLAUNCH_TEST_B"]) == ("during", "during")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert os.environ["ORTLAUNCH_TEST_A"] == "before"
    assert "ORTLAUNCH_TEST_B" not in os.environ
