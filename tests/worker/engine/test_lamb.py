"""LAMB compared with its formula for each tensor, with AdamW without decay, and with timm."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ortlaunch.worker.engine import lamb
from ortlaunch.worker.engine.lamb import Lamb
from tests.worker.lamb_problem import SETTINGS, trained

RATES = (0.05, 0.1, 0.1, 0.02, 0.0, 0.07)
BETAS = (0.9, 0.98)
EPS = 1e-6
DECAY = 0.01
Arrays = list[np.ndarray[Any, Any]]


def reference(weights: Arrays, gradients: list[Arrays], decay: float) -> Arrays:
    """Return the weights after all steps, in float64, by the formula of NVIDIA's FusedLAMB.

    Its options are adam_w_mode and grad_averaging, without use_nvlamb.
    """
    found = []
    for number, start in enumerate(weights):
        w = start.astype(np.float64)
        m = np.zeros(start.shape)
        v = np.zeros(start.shape)
        for step, rate in enumerate(RATES, 1):
            g = gradients[step - 1][number].astype(np.float64)
            m = BETAS[0] * m + (1 - BETAS[0]) * g
            v = BETAS[1] * v + (1 - BETAS[1]) * g * g
            update = (m / (1 - BETAS[0] ** step)) / (
                np.sqrt(v / (1 - BETAS[1] ** step)) + EPS
            ) + decay * w
            w_norm = np.linalg.norm(w)
            u_norm = np.linalg.norm(update)
            # Without use_nvlamb, tensors without weight decay have a ratio of 1.
            ratio = w_norm / u_norm if decay and w_norm and u_norm else 1.0
            w = w - rate * ratio * update
        found.append(w)
    return found


def tensors(seed: int) -> Arrays:
    """Return a matrix, a vector, a scalar, zeros, and tensors of a large and of a tiny scale."""
    random = np.random.default_rng(seed)
    return [
        random.normal(size=(7, 5)),
        random.normal(size=11),
        random.normal(size=()),
        np.zeros((3, 2)),
        1e3 * random.normal(size=4),
        1e-4 * random.normal(size=(2, 2, 2)),
    ]


def noise(steps: int = len(RATES)) -> list[Arrays]:
    """Return the gradients of each step for each of the tensors."""
    random = np.random.default_rng(1)
    return [
        [np.asarray(random.normal(size=array.shape)) for array in tensors(0)] for _ in range(steps)
    ]


def train(
    optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor], gradients: list[Arrays]
) -> None:
    """Run one step with each of RATES."""
    for rate, step in zip(RATES, gradients):
        for group in optimizer.param_groups:
            group["lr"] = rate
        for parameter, gradient in zip(parameters, step):
            parameter.grad = torch.as_tensor(gradient, dtype=parameter.dtype)
        optimizer.step()


def parameters_of(arrays: Arrays, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    return [torch.tensor(array, dtype=dtype, requires_grad=True) for array in arrays]


@pytest.mark.parametrize("portion", [1, 16, 1 << 25])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
def test_it_is_the_paper_formula(
    dtype: torch.dtype, tolerance: float, portion: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six steps of both groups equal the formula in each tensor, also with zeros."""
    # Portions of all sizes: a tensor each, a few together, and all at once.
    monkeypatch.setattr(lamb, "_PORTION", portion)
    start = tensors(0)
    gradients = noise()
    for step in gradients:
        # A tensor whose gradient is always zero still decays.
        step[1][:] = 0.0
    gradients[2][0][:] = 0.0
    decayed = parameters_of(start, dtype)
    spared = parameters_of(start, dtype)
    groups = [{"params": decayed, "weight_decay": DECAY}, {"params": spared, "weight_decay": 0.0}]
    train(
        Lamb(groups, betas=BETAS, eps=EPS),
        [*decayed, *spared],
        [[*step, *step] for step in gradients],
    )
    for parameters, decay in ((decayed, DECAY), (spared, 0.0)):
        for parameter, expected in zip(parameters, reference(start, gradients, decay)):
            np.testing.assert_allclose(
                parameter.detach().numpy(), expected, rtol=tolerance, atol=tolerance * 1e-2
            )


def test_without_decay_it_is_adam() -> None:
    """Without weight decay the trust ratio is 1, and the weights are those of Adam."""
    start = tensors(0)
    gradients = noise()
    ours = parameters_of(start)
    theirs = parameters_of(start)
    train(Lamb(ours, betas=BETAS, eps=EPS), ours, gradients)
    train(torch.optim.AdamW(theirs, betas=BETAS, eps=EPS, weight_decay=0.0), theirs, gradients)
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-15)


def test_each_tensor_moves_by_the_rate_times_its_own_norm() -> None:
    """With decay the first step of each tensor has the length rate x |weights|."""
    # Zero weights have a ratio of 1, too.
    start = [array for array in tensors(0) if np.any(array)]
    parameters = parameters_of(start)
    optimizer = Lamb(parameters, lr=0.1, betas=BETAS, eps=EPS, weight_decay=DECAY)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    moved = [np.linalg.norm(p.detach().numpy() - before) for p, before in zip(parameters, start)]
    np.testing.assert_allclose(
        moved, [0.1 * np.linalg.norm(before) for before in start], rtol=1e-12
    )


def test_nothing_to_do_changes_nothing() -> None:
    """Zero weights with zero gradients stay zero, and a parameter without gradient is unchanged."""
    zero, absent = parameters_of([np.zeros(3), np.ones(3)])
    optimizer = Lamb([zero, absent], lr=0.1, weight_decay=DECAY)
    zero.grad = torch.zeros_like(zero)
    optimizer.step()
    assert zero.tolist() == [0.0, 0.0, 0.0]
    assert absent.tolist() == [1.0, 1.0, 1.0]
    assert absent not in optimizer.state


def test_a_saved_state_goes_on_where_it_was() -> None:
    """An optimizer that loads a saved state makes the same further steps."""
    start = tensors(0)
    gradients = noise(2 * len(RATES))
    whole = parameters_of(start)
    optimizer = Lamb(whole, betas=BETAS, eps=EPS, weight_decay=DECAY)
    train(optimizer, whole, gradients[: len(RATES)])
    saved = copy.deepcopy(optimizer.state_dict())
    resumed = [p.detach().clone().requires_grad_() for p in whole]
    train(optimizer, whole, gradients[len(RATES) :])
    other = Lamb(resumed)
    other.load_state_dict(saved)
    train(other, resumed, gradients[len(RATES) :])
    assert all(torch.equal(a, b) for a, b in zip(whole, resumed))


# Weights after the steps of timm's LAMB.
TIMM = json.loads(Path(__file__).with_name("lamb_timm.json").read_text())


@pytest.mark.parametrize("always_adapt", [False, True], ids=["NVIDIA's", "the paper's"])
def test_fifty_steps_are_timms(always_adapt: bool) -> None:
    """Fifty steps without clipping equal timm's, in NVIDIA's form and in the paper's."""
    # The paper also scales tensors without weight decay.
    ours = trained(lambda groups: Lamb(groups, always_adapt=always_adapt, **SETTINGS))
    np.testing.assert_allclose(ours, TIMM[str(always_adapt)], rtol=1e-6)
