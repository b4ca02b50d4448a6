"""Every layer, loss and activation of torch.nn that has a gradient, each with its inputs.

A case is a function that returns (module, inputs). A class of torch.nn that is neither a case nor in
NO_CASE fails a test.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Case = tuple[nn.Module, list[Any]]
# Base classes, containers, old names of other classes, and classes for several GPUs.
NO_CASE = {
    "Container", "DataParallel", "Module", "ModuleDict", "ModuleList", "NLLLoss2d", "ParameterDict", "ParameterList",
    "RNNBase", "RNNCellBase", "Sequential", "SyncBatchNorm",
}  # fmt: skip
# Batch, channels and positions, by the number of spatial axes.
_SIZES = {1: (3, 4, 12), 2: (3, 4, 8, 8), 3: (2, 4, 6, 6, 6)}


_PLAIN = """
    ELU CELU GELU Hardshrink Hardsigmoid Hardswish Hardtanh LeakyReLU LogSigmoid LogSoftmax Mish PReLU ReLU ReLU6 SELU
    SiLU Sigmoid Softmax Softmin Softplus Softshrink Softsign Tanh Tanhshrink GLU Identity Flatten AlphaDropout Dropout
    FeatureAlphaDropout RReLU
"""


def x(*sizes: int) -> torch.Tensor:
    return torch.randn(*(sizes or (4, 6)))


def cases() -> dict[str, Callable[[], Case]]:
    """Return the cases by class name, followed by a variant where a class has several."""
    found: dict[str, Callable[[], Case]] = {}
    for name in _PLAIN.split():
        found[name] = _plain(name)
    for dims, sizes in _SIZES.items():
        found.update(_spatial(dims, sizes))
    found.update(_others())
    found.update(_losses())
    found.update(_recurrent())
    return found


def _plain(name: str) -> Callable[[], Case]:
    settings: dict[str, Any] = {"dim": -1} if name in ("LogSoftmax", "Softmax", "Softmin") else {}
    if "Dropout" in name:
        # Random values could not be compared with eager's.
        settings = {"p": 0.0}
    if name == "RReLU":
        # Equal bounds: RReLU draws its slope between them.
        settings = {"lower": 0.2, "upper": 0.2}
    return lambda: (getattr(nn, name)(**settings), [x(3, 6)])


def _spatial(dims: int, sizes: tuple[int, ...]) -> dict[str, Callable[[], Case]]:
    def layer(
        name: str, *args: Any, of: tuple[int, ...] = sizes, **settings: Any
    ) -> Callable[[], Case]:
        return lambda: (getattr(nn, name)(*args, **settings), [x(*of)])

    n = f"{dims}d"
    found = {
        f"AdaptiveAvgPool{n}": layer(f"AdaptiveAvgPool{n}", 3),
        f"AdaptiveMaxPool{n}": layer(f"AdaptiveMaxPool{n}", 3),
    }
    # No size is a multiple of 5: the windows differ in length.
    found[f"AdaptiveAvgPool{n} uneven"] = layer(f"AdaptiveAvgPool{n}", 5)
    for pool in ("AvgPool", "MaxPool"):
        found[f"{pool}{n}"] = layer(f"{pool}{n}", 2)
        found[f"{pool}{n} overlapping"] = layer(f"{pool}{n}", 3, stride=2, padding=1)
    found[f"LPPool{n}"] = layer(f"LPPool{n}", 2, 2)
    for norm in ("BatchNorm", "InstanceNorm"):
        found[f"{norm}{n}"] = layer(f"{norm}{n}", 4)
        found[f"Lazy{norm}{n}"] = layer(f"Lazy{norm}{n}")
    found[f"InstanceNorm{n} affine"] = layer(f"InstanceNorm{n}", 4, affine=True)
    for conv in ("Conv", "ConvTranspose"):
        found[f"{conv}{n}"] = layer(f"{conv}{n}", 4, 6, 3)
        found[f"{conv}{n} strided"] = layer(f"{conv}{n}", 4, 6, 3, stride=2, padding=1)
        found[f"Lazy{conv}{n}"] = layer(f"Lazy{conv}{n}", 6, 3)
    found[f"Conv{n} groups"] = layer(f"Conv{n}", 4, 4, 3, groups=2, dilation=2 if dims < 3 else 1)
    found[f"Conv{n} circular"] = layer(f"Conv{n}", 4, 4, 3, padding=1, padding_mode="circular")
    for pad in ("CircularPad", "ReflectionPad", "ReplicationPad", "ZeroPad"):
        found[f"{pad}{n}"] = layer(f"{pad}{n}", 2)
    found[f"ConstantPad{n}"] = layer(f"ConstantPad{n}", 2, 0.5)
    found[f"Dropout{n}"] = layer(f"Dropout{n}", 0.0)
    found[f"MaxUnpool{n}"] = lambda: (_Unpool(dims), [x(*sizes)])
    if dims > 1:
        found[f"FractionalMaxPool{n}"] = lambda: (
            # Fixed samples: the pooling regions would otherwise be random.
            getattr(nn, f"FractionalMaxPool{n}")(
                2, output_size=4, _random_samples=torch.rand(sizes[0], 4, dims)
            ),
            [x(*sizes)],
        )
    return found


# MaxUnpool needs the indices that MaxPool returns.
class _Unpool(nn.Module):
    def __init__(self, dims: int) -> None:
        super().__init__()
        self.pool = getattr(nn, f"MaxPool{dims}d")(2, return_indices=True)
        self.unpool = getattr(nn, f"MaxUnpool{dims}d")(2)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.unpool(*self.pool(given))
        return out


def _others() -> dict[str, Callable[[], Case]]:
    images = _SIZES[2]
    ids = torch.tensor([[1, 2, 4, 5], [4, 3, 2, 9]])
    return {
        "Bilinear": lambda: (nn.Bilinear(5, 6, 3), [x(4, 5), x(4, 6)]),
        "ChannelShuffle": lambda: (nn.ChannelShuffle(2), [x(*images)]),
        "CosineSimilarity": lambda: (nn.CosineSimilarity(), [x(), x()]),
        "CrossMapLRN2d": lambda: (nn.CrossMapLRN2d(2), [x(*images)]),
        "Embedding": lambda: (nn.Embedding(10, 3), [ids]),
        "Embedding padding": lambda: (nn.Embedding(10, 3, padding_idx=2), [ids]),
        "EmbeddingBag": lambda: (nn.EmbeddingBag(10, 3), [ids]),
        "EmbeddingBag sum": lambda: (nn.EmbeddingBag(10, 3, mode="sum"), [ids]),
        "EmbeddingBag max": lambda: (nn.EmbeddingBag(10, 3, mode="max"), [ids]),
        "Fold": lambda: (nn.Fold((4, 5), (2, 2)), [x(2, 12, 12)]),
        "Unfold": lambda: (nn.Unfold((2, 3)), [x(2, 3, 5, 6)]),
        "GroupNorm": lambda: (nn.GroupNorm(2, 4), [x(*images)]),
        "LayerNorm": lambda: (nn.LayerNorm(6), [x()]),
        "LayerNorm without bias": lambda: (nn.LayerNorm(6, bias=False), [x()]),
        "LayerNorm without weights": lambda: (nn.LayerNorm(6, elementwise_affine=False), [x()]),
        "LayerNorm two axes": lambda: (nn.LayerNorm([8, 8]), [x(*images)]),
        "LazyLinear": lambda: (nn.LazyLinear(5), [x()]),
        "Linear": lambda: (nn.Linear(6, 5), [x()]),
        "LocalResponseNorm": lambda: (nn.LocalResponseNorm(2), [x(*images)]),
        "MultiheadAttention": lambda: (
            nn.MultiheadAttention(8, 2, batch_first=True),
            [x(2, 5, 8)] * 3,
        ),
        "PairwiseDistance": lambda: (nn.PairwiseDistance(), [x(), x()]),
        "PixelShuffle": lambda: (nn.PixelShuffle(2), [x(*images)]),
        "PixelUnshuffle": lambda: (nn.PixelUnshuffle(2), [x(*images)]),
        "RMSNorm": lambda: (nn.RMSNorm(6), [x()]),
        "Softmax2d": lambda: (nn.Softmax2d(), [x(*images)]),
        "Threshold": lambda: (nn.Threshold(0.1, 2.0), [x()]),
        "Transformer": lambda: (
            _transformer(nn.Transformer, 8, 2, 1, 1, 16),
            [x(2, 5, 8), x(2, 3, 8)],
        ),
        "TransformerDecoder": lambda: (
            nn.TransformerDecoder(_transformer(nn.TransformerDecoderLayer, 8, 2, 16), 2),
            [x(2, 5, 8), x(2, 3, 8)],
        ),
        "TransformerDecoderLayer": lambda: (
            _transformer(nn.TransformerDecoderLayer, 8, 2, 16),
            [x(2, 5, 8), x(2, 3, 8)],
        ),
        "TransformerEncoder": lambda: (
            nn.TransformerEncoder(_transformer(nn.TransformerEncoderLayer, 8, 2, 16), 2),
            [x(2, 5, 8)],
        ),
        "TransformerEncoderLayer": lambda: (
            _transformer(nn.TransformerEncoderLayer, 8, 2, 16),
            [x(2, 5, 8)],
        ),
        "Unflatten": lambda: (nn.Unflatten(1, (2, 3)), [x()]),
        "Upsample nearest": lambda: (nn.Upsample(scale_factor=2), [x(*images)]),
        "Upsample linear": lambda: (nn.Upsample(scale_factor=2, mode="linear"), [x(3, 4, 12)]),
        "Upsample bilinear": lambda: (nn.Upsample(scale_factor=2, mode="bilinear"), [x(*images)]),
        "Upsample bicubic": lambda: (nn.Upsample(scale_factor=2, mode="bicubic"), [x(*images)]),
        "Upsample trilinear": lambda: (
            nn.Upsample(scale_factor=2, mode="trilinear"),
            [x(*_SIZES[3])],
        ),
        "UpsamplingBilinear2d": lambda: (nn.UpsamplingBilinear2d(scale_factor=2), [x(*images)]),
        "UpsamplingNearest2d": lambda: (nn.UpsamplingNearest2d(scale_factor=2), [x(*images)]),
        "spectral_norm": lambda: (nn.utils.parametrizations.spectral_norm(nn.Linear(6, 5)), [x()]),
        "weight_norm": lambda: (nn.utils.parametrizations.weight_norm(nn.Linear(6, 5)), [x()]),
    }


def _transformer(kind: Any, *args: Any) -> nn.Module:
    module: nn.Module = kind(*args, dropout=0.0, batch_first=True)
    return module


def _losses() -> dict[str, Callable[[], Case]]:
    classes = torch.tensor([1, 0, 3, 2])
    signs = torch.tensor([1.0, -1.0, 1.0, -1.0])
    # MultiLabelMarginLoss reads the classes of a row up to the first -1.
    many = torch.tensor([[3, 0, -1, 1, 2, 4]] * 4)
    binary = (torch.arange(24).reshape(4, 6) % 2).float()
    found: dict[str, Callable[[], Case]] = {
        "AdaptiveLogSoftmaxWithLoss": lambda: (
            _Second(nn.AdaptiveLogSoftmaxWithLoss(6, 8, [2, 5])),
            [x(), classes],
        ),
        "BCELoss": lambda: (_Sigmoid(nn.BCELoss()), [x(), binary]),
        "BCEWithLogitsLoss": lambda: (nn.BCEWithLogitsLoss(), [x(), binary]),
        "BCEWithLogitsLoss weighted": lambda: (
            nn.BCEWithLogitsLoss(pos_weight=torch.full((6,), 2.0)),
            [x(), binary],
        ),
        "CTCLoss": lambda: (
            _Log(nn.CTCLoss()),
            [
                x(9, 2, 6),
                torch.tensor([[1, 2, 3], [2, 2, 4]]),
                torch.tensor([9, 9]),
                torch.tensor([3, 2]),
            ],
        ),
        "CosineEmbeddingLoss": lambda: (nn.CosineEmbeddingLoss(), [x(), x(), signs]),
        "CrossEntropyLoss": lambda: (nn.CrossEntropyLoss(), [x(), classes]),
        "CrossEntropyLoss weighted": lambda: (
            nn.CrossEntropyLoss(torch.rand(6) + 0.5),
            [x(), classes],
        ),
        "CrossEntropyLoss smoothed": lambda: (
            nn.CrossEntropyLoss(label_smoothing=0.1),
            [x(), classes],
        ),
        "GaussianNLLLoss": lambda: (_Variance(nn.GaussianNLLLoss()), [x(), x(), x()]),
        "HingeEmbeddingLoss": lambda: (nn.HingeEmbeddingLoss(), [x(4), signs]),
        "HuberLoss": lambda: (nn.HuberLoss(), [x(), x()]),
        "KLDivLoss": lambda: (_Log(nn.KLDivLoss(reduction="batchmean")), [x(), x().softmax(-1)]),
        "L1Loss": lambda: (nn.L1Loss(), [x(), x()]),
        "LinearCrossEntropyLoss": lambda: (nn.LinearCrossEntropyLoss(6, 8), [x(), classes]),
        "MSELoss": lambda: (nn.MSELoss(), [x(), x()]),
        "MarginRankingLoss": lambda: (nn.MarginRankingLoss(), [x(4), x(4), signs]),
        "MultiLabelMarginLoss": lambda: (nn.MultiLabelMarginLoss(), [x(), many]),
        "MultiLabelSoftMarginLoss": lambda: (nn.MultiLabelSoftMarginLoss(), [x(), binary]),
        "MultiMarginLoss": lambda: (nn.MultiMarginLoss(), [x(), classes]),
        "NLLLoss": lambda: (_Log(nn.NLLLoss()), [x(), classes]),
        "PoissonNLLLoss": lambda: (nn.PoissonNLLLoss(), [x(), x().exp()]),
        "SmoothL1Loss": lambda: (nn.SmoothL1Loss(), [x(), x()]),
        "SoftMarginLoss": lambda: (nn.SoftMarginLoss(), [x(4), signs]),
        "TripletMarginLoss": lambda: (nn.TripletMarginLoss(), [x(), x(), x()]),
        "TripletMarginWithDistanceLoss": lambda: (
            nn.TripletMarginWithDistanceLoss(),
            [x(), x(), x()],
        ),
    }
    # A release of torch may lack one of these classes.
    return {name: case for name, case in found.items() if hasattr(nn, name.split()[0])}


# A loss behind a function that brings its first input into the range that the loss requires.
class _First(nn.Module):
    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, given: torch.Tensor, *rest: Any) -> Any:
        return self.loss(self.first(given), *rest)

    def first(self, given: torch.Tensor) -> torch.Tensor:
        return given


class _Log(_First):
    def first(self, given: torch.Tensor) -> torch.Tensor:
        return given.log_softmax(-1)


class _Sigmoid(_First):
    def first(self, given: torch.Tensor) -> torch.Tensor:
        return given.sigmoid()


# AdaptiveLogSoftmaxWithLoss returns (output, loss).
class _Second(_First):
    def forward(self, given: torch.Tensor, *rest: Any) -> Any:
        return self.loss(given, *rest).loss


# GaussianNLLLoss requires variances above zero.
class _Variance(_First):
    def forward(self, given: torch.Tensor, *rest: Any) -> Any:
        return self.loss(given, rest[0], rest[1].square() + 0.1)


def _recurrent() -> dict[str, Callable[[], Case]]:
    found: dict[str, Callable[[], Case]] = {}
    for name in ("RNN", "LSTM", "GRU"):
        kind = getattr(nn, name)
        # The default argument keeps this pass's class: a lambda reads names when called.
        found[name] = lambda kind=kind: (kind(4, 5, batch_first=True), [x(2, 6, 4)])
        found[f"{name} two layers"] = lambda kind=kind: (
            kind(4, 5, 2, batch_first=True),
            [x(2, 6, 4)],
        )
        found[f"{name} bidirectional"] = lambda kind=kind: (
            kind(4, 5, 2, batch_first=True, bidirectional=True),
            [x(2, 6, 4)],
        )
        cell = getattr(nn, f"{name}Cell")
        found[f"{name}Cell"] = lambda cell=cell: (cell(4, 5), [x(3, 4)])
    found["RNN relu"] = lambda: (nn.RNN(4, 5, nonlinearity="relu", batch_first=True), [x(2, 6, 4)])
    found["LSTM projected"] = lambda: (nn.LSTM(4, 5, proj_size=3, batch_first=True), [x(2, 6, 4)])
    return found
