"""The adding problem: a sequence of numbers, two of which are marked; what is their sum? (Hochreiter and
Schmidhuber, 1997.) Any torch.nn.Module will do whose forward takes the keys of a sample and returns its loss.
What it returns beside that, with a row a sample, is an output of `ortlaunch export RUN --format onnx`."""

import torch
from torch import nn


class Adder(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.memory = nn.GRU(2, hidden, batch_first=True)
        self.out = nn.Linear(hidden, 1)

    def forward(self, numbers, total=None):
        states, _ = self.memory(numbers)
        found = self.out(states[:, -1])
        return (
            {"sum": found}
            if total is None
            else {"loss": ((found - total) ** 2).mean(), "sum": found}
        )


def model(hidden=48):
    return Adder(hidden)


def data(samples, length=20, seed=0):
    """Each sample: `length` pairs of a number and whether it counts, and the sum of the two that do."""
    generator = torch.Generator().manual_seed(seed)
    values, marks = torch.rand(samples, length, generator=generator), torch.zeros(samples, length)
    places = torch.rand(samples, length, generator=generator).argsort(1)[:, :2]
    marks.scatter_(1, places, 1.0)
    totals = (values * marks).sum(1, keepdim=True)
    return [
        {"numbers": pair, "total": total}
        for pair, total in zip(torch.stack([values, marks], -1), totals)
    ]
