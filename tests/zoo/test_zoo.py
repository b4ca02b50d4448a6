"""Layers and models that train on engine ort as in eager PyTorch.

`make zoo` writes the page of results (docs/evidence/models.md).

Each case runs three steps of SGD on a CPU, on engine `ort` and in eager PyTorch, with the same
weights and inputs. Losses and all gradients of each step, and buffers at the end, are equal to 1e-5
(norm of the difference / norm). If not, they must be at most 4 times as far from float64's values as
eager's, in each step. A case is a child process with limits of time and memory. A case takes 2 to
40 s; all of them take an hour of one core.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import resource
import signal
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from tests.ort import needs_ort
from tests.zoo import families, layers, nets, training

# Limits of one case; GIB is of RLIMIT_DATA.
SECONDS = 240
GIB = 6.0
TITLES = {
    "layers": "Layers, losses and activations of torch.nn",
    "frozen": "Layers of torch.nn whose weights are frozen, all or every other one",
    "given": "Layers of torch.nn on a batch without a gradient, and in evaluation mode",
    "nets": "Nets written out",
    "masked-lm": "AutoModelForMaskedLM",
    "causal-lm": "AutoModelForCausalLM",
    "sequence-classification": "AutoModelForSequenceClassification",
    "image-classification": "AutoModelForImageClassification",
    "speech-seq2seq": "AutoModelForSpeechSeq2Seq",
    "ctc": "AutoModelForCTC",
}
# Kinds of which attention is tried as in long sequences; in others it is written out.
LONG = {"layers", "causal-lm", "speech-seq2seq", "ctc"}
# Families that do not train on engine ort today (docs/evidence/models.md gives the reasons).
KNOWN = {
    *((task, "reformer") for task in ("masked-lm", "causal-lm", "sequence-classification")),
    *((task, "phimoe") for task in ("causal-lm", "sequence-classification")),
    *((task, "zamba2") for task in ("causal-lm", "sequence-classification")),
    *(("causal-lm", name) for name in ("gemma3n_text", "musicgen", "musicgen_melody")),
    ("sequence-classification", "t5gemma2"),
    # Rounding that grows over three steps, on one processor or another.
    *(("image-classification", name) for name in ("hgnet_v2", "mobilenet_v2", "textnet")),
    *(("speech-seq2seq", name) for name in ("seamless_m4t", "seamless_m4t_v2")),
}
pytestmark = [pytest.mark.zoo, pytest.mark.timeout(SECONDS + 120), needs_ort]


def made(kind: str) -> dict[str, Callable[[], Any]]:
    """Return the function that builds model and inputs of each case, by name."""
    if kind in ("layers", "given"):
        net = training.Net if kind == "layers" else training.Given
        return {
            name: partial(training.layer_net, make, kind=net)
            for name, make in layers.cases().items()
        }
    if kind == "frozen":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            weighted = {
                name: make for name, make in layers.cases().items() if [*make()[0].parameters()]
            }
        return {
            f"{name}, {share}": partial(training.layer_net, make, frozen=frozen)
            for frozen, share in ((1, "all"), (2, "half"))
            for name, make in weighted.items()
        }
    return nets.cases() if kind == "nets" else families.cases(kind)


def parameters() -> list[Any]:
    """Return every case; those that are known to fail carry the mark xfail."""
    known = pytest.mark.xfail(reason="docs/evidence/models.md")
    return [
        pytest.param(kind, name, id=f"{kind}: {name}", marks=known if (kind, name) in KNOWN else ())
        for kind in TITLES
        for name in made(kind)
    ]


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    """Apply the repairs once for all cases, before they are forked."""
    from ortmodule import ORTModule

    torch.set_num_threads(1)
    # No graph is built here: a forked child cannot use its parent's threads.
    ORTModule(nn.Linear(1, 1))
    # An export imports this, and collects garbage; in a child of this process both take seconds.
    importlib.import_module("torch._dynamo")
    gc.collect()
    gc.freeze()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "name"), parameters())
def test_it_trains_as_in_eager(
    kind: str, name: str, record_property: Callable[[str, object], None]
) -> None:
    """A case gives the losses, gradients and buffers of eager PyTorch over three steps."""
    record_property("part", TITLES[kind])
    record_property("case", name)
    found = in_child(made(kind)[name], kind in LONG)
    for column in ("difference", "step 1 from float64, eager's", "torch in the graph"):
        record_property(column, found.get(column))
    if found["state"] == "no case":
        pytest.skip(f"eager does not run it: {found['why']}")
    if found.get("before"):
        record_property("note", f"with `torch_operators: off`: {found['before']}")
    print(found.get("trace", ""))
    assert found["state"] == "trains", found["why"]


def test_no_layer_is_forgotten() -> None:
    """Every class of torch.nn is a case or is listed in NO_CASE."""
    classes = {
        name
        for name in dir(nn)
        if isinstance(getattr(nn, name), type) and issubclass(getattr(nn, name), nn.Module)
    }
    tried = {name.split()[0] for name in layers.cases()}
    assert classes - tried <= layers.NO_CASE


def in_child(make: Callable[[], Any], long: bool) -> dict[str, Any]:
    """Return the result of one case, also if its process dies."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            signal.alarm(SECONDS)
            resource.setrlimit(resource.RLIMIT_DATA, (int(GIB * 2**30),) * 2)
            os.write(write, json.dumps(training.tried(make, long)).encode())
            os._exit(0)
        finally:
            # Also after an error: the child must not return into pytest and its cleanup.
            os._exit(1)
    # Without this the read below would never see the end of the pipe.
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        text = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    late = (
        f"no result in {SECONDS} s"
        if status == -signal.SIGALRM
        else f"the process ended with {status}"
    )
    return dict(json.loads(text)) if text and not status else {"state": "ended", "why": late}
