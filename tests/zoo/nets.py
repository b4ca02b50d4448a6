"""Nets written by hand, as users write them. A case is (module, inputs); the module returns its loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations, rnn

from tests.zoo import more_nets

Case = tuple[nn.Module, list[Any]]
x = torch.randn


def cases() -> dict[str, Callable[[], Case]]:
    """Return the cases by name."""
    return {
        "tagger: bidirectional LSTM, packed": lambda: (Tagger(), [torch.arange(14).view(2, 7), torch.tensor([7, 5])]),
        "speech: convolutions, GRU both ways, CTC": lambda: (Speech(), [x(2, 8, 40), torch.randint(1, 9, (2, 5))]),
        "picture: GroupNorm, Mish, adaptive pools": lambda: (Picture(), [x(4, 3, 17, 17), torch.arange(4)]),
        "U-Net: transposed convolution, bilinear": lambda: (UNet(), [x(2, 3, 16, 16), x(2, 1, 16, 16)]),
        "experts: topk, scatter, RMSNorm": lambda: (Experts(), [x(10, 8)]),
        "spectral mixing: FFT": lambda: (Spectral(), [x(3, 16, 8)]),
        "critic: spectral norm, PReLU, Huber": lambda: (Critic(), [x(6, 8), x(6, 1)]),
        "graph: scatter_reduce, segment softmax": lambda: (Graph(), [x(9, 6), torch.randint(0, 9, (2, 20))]),
        "spatial transformer: affine_grid, grid_sample": lambda: (Spatial(), [x(2, 3, 9, 9)]),
        "flow: slogdet, triangular solve": lambda: (Flow(), [x(5, 4)]),
        "filter: Cholesky, inverse, einsum": lambda: (Filter(), [x(4, 6, 3)]),
        "clicks: EmbeddingBag, cumprod, BCE": lambda: (
            Clicks(), [torch.randint(0, 50, (12,)), torch.tensor([0, 3, 8]), torch.rand(3)]
        ),
        "pondering: a loop until a value says stop": lambda: (Pondering(), [x(4, 8)]),
        "ResNet block, squeeze and excitation": lambda: (Residual(), [x(4, 6, 8, 8)]),
        "ShuffleNet: groups, channel shuffle": lambda: (Shuffle(), [x(4, 8, 8, 8)]),
        "WaveNet: dilated, gated": lambda: (Wave(), [x(2, 4, 30)]),
        "contrast: cdist, logsumexp, roll": lambda: (Contrast(), [x(6, 8), x(6, 8)]),
        "variational: distributions, softplus": lambda: (Variational(), [x(6, 8)]),
        "table: embeddings, vectors added to layers": lambda: (Table(), [x(6, 8), torch.arange(6) % 3, x(6)]),
        **more_nets.cases(),
    }  # fmt: skip


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 6)
        self.out = nn.Linear(10, 4)
        self.layer = PackedLSTM()

    def forward(self, words: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(
            self.out(self.layer(self.words(words), lengths)).flatten(0, 1), words.flatten() % 4
        )


# A separate module, so that `torch_modules` can name it alone.
class PackedLSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 5, batch_first=True, bidirectional=True)

    def forward(self, given: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = rnn.pack_padded_sequence(given, lengths, batch_first=True)
        # Without total_length the result's length would depend on the values of `lengths`.
        return rnn.pad_packed_sequence(
            self.lstm(packed)[0], batch_first=True, total_length=given.shape[1]
        )[0]


class Speech(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv1d(8, 12, 3, 2, 1), nn.BatchNorm1d(12), nn.Hardswish())
        self.gru = nn.GRU(12, 6, batch_first=True, bidirectional=True)
        self.out = nn.Linear(12, 9)

    def forward(self, sound: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        logs = (
            self.out(self.gru(self.first(sound).transpose(1, 2))[0]).log_softmax(-1).transpose(0, 1)
        )
        # The convolution's stride of 2 leaves 20 of 40 frames.
        lengths = torch.full((2,), 20), torch.full((2,), 5)
        return functional.ctc_loss(logs, words, *lengths)


class Picture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.Mish(), nn.Conv2d(8, 8, 3, groups=4)
        )
        # Each of 8 channels gives four averages and one maximum.
        self.out = nn.Linear(8 * 5, 5)

    def forward(self, picture: torch.Tensor, kind: torch.Tensor) -> torch.Tensor:
        h = self.layers(picture)
        pooled = [
            functional.adaptive_avg_pool2d(h, 2).flatten(1),
            functional.adaptive_max_pool2d(h, 1).flatten(1),
        ]
        return functional.cross_entropy(self.out(torch.cat(pooled, 1)), kind, label_smoothing=0.1)


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1), nn.InstanceNorm2d(8, affine=True), nn.ELU()
        )
        self.up = nn.ConvTranspose2d(8, 8, 2, 2)
        self.skip = nn.Conv2d(3, 8, 1)
        # Three branches of 8 channels are concatenated.
        self.out = nn.Conv2d(24, 1, 1)

    def forward(self, picture: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        low = self.down(picture)
        wide = functional.interpolate(low, scale_factor=2, mode="bilinear", align_corners=False)
        joined = torch.cat([self.up(low), wide, self.skip(picture)], 1)
        return functional.binary_cross_entropy_with_logits(self.out(joined), (mask > 0).float())


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(8)
        self.gate = nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        h = self.norm(given)
        best, places = self.gate(h).topk(2)
        # Experts outside the best two get a share of zero.
        shares = torch.zeros(h.shape[0], 4).scatter(1, places, best.softmax(-1))
        mixed = torch.stack([expert(h) for expert in self.experts], 1)
        return (mixed * shares.unsqueeze(-1)).sum(1).square().mean()


class Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        # 16 real values have 9 frequencies; the last axis is real and imaginary part.
        self.filter = nn.Parameter(x(9, 8, 2))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        spectrum = torch.fft.rfft(self.first(given), dim=1) * torch.view_as_complex(self.filter)
        return torch.fft.irfft(spectrum, n=given.shape[1], dim=1).square().mean()


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            parametrizations.spectral_norm(nn.Linear(8, 8)), nn.PReLU(), nn.Linear(8, 1)
        )

    def forward(self, given: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return functional.huber_loss(self.layers(given), wanted, delta=0.5)


class Graph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.node = nn.Linear(6, 6)
        self.score = nn.Linear(12, 1)

    def forward(self, nodes: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        h, (source, target) = self.node(nodes), edges.unbind()
        scores = functional.leaky_relu(
            self.score(torch.cat([h[source], h[target]], -1)).squeeze(-1), 0.2
        )
        most = torch.full((len(nodes),), -1e9).scatter_reduce(0, target, scores, "amax")
        # Softmax over the edges of each target; the maximum keeps exp from overflowing.
        weights = (scores - most[target]).exp()
        total = torch.zeros(len(nodes)).index_add(0, target, weights)
        mixed = torch.zeros_like(h).index_add(
            0, target, h[source] * (weights / total[target]).unsqueeze(-1)
        )
        return mixed.square().mean()


class Spatial(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.where = nn.Linear(3, 6)
        self.what = nn.Conv2d(3, 4, 3)

    def forward(self, picture: torch.Tensor) -> torch.Tensor:
        # An offset from the identity transform.
        turn = self.where(picture.mean((2, 3))).view(-1, 2, 3) + torch.eye(2, 3)
        grid = functional.affine_grid(turn, list(picture.shape), align_corners=False)
        return self.what(functional.grid_sample(picture, grid, align_corners=False)).square().mean()


class Flow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # Near the identity, so that the determinant is not zero.
        self.mix = nn.Parameter(torch.eye(4) + 0.1 * x(4, 4))
        self.scale = nn.Parameter(x(4, 4))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        # A large diagonal keeps the triangular solve well conditioned.
        low = self.scale.tril() + 3 * torch.eye(4)
        z = torch.linalg.solve_triangular(low, (given @ self.mix).T, upper=False).T
        return (
            0.5 * z.square().sum(-1).mean()
            - torch.linalg.slogdet(self.mix)[1]
            + low.diagonal().abs().log().sum()
        )


class Filter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Parameter(0.5 * x(3, 3))
        self.noise = nn.Parameter(x(3, 3))

    def forward(self, seen: torch.Tensor) -> torch.Tensor:
        # Positive definite, as Cholesky requires.
        noise = self.noise @ self.noise.T + torch.eye(3)
        spread = torch.eye(3)
        mean = torch.zeros(seen.shape[0], 3)
        loss = torch.zeros(())
        for row in seen.unbind(1):
            spread = self.step @ spread @ self.step.T + noise
            mean = mean @ self.step.T
            gain = spread @ torch.linalg.inv(spread + torch.eye(3))
            loss = (
                loss
                + torch.linalg.cholesky(spread).diagonal().log().sum()
                + (row - mean).square().mean()
            )
            mean = mean + torch.einsum("ij,bj->bi", gain, row - mean)
            spread = spread - gain @ spread
        return loss


class Clicks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.items = nn.EmbeddingBag(50, 6, mode="mean")
        self.out = nn.Linear(6, 5)

    def forward(
        self, items: torch.Tensor, starts: torch.Tensor, clicked: torch.Tensor
    ) -> torch.Tensor:
        seen = self.out(self.items(items, starts)).sigmoid().cumprod(-1)
        return functional.binary_cross_entropy(seen.mean(-1), clicked)


class Pondering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.loop = Loop()

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return self.loop(self.first(given)).square().mean()


# The number of passes depends on a tensor's value. A separate module, as PackedLSTM.
class Loop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Linear(8, 8)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        for _ in range(5):
            given = given + self.step(given).tanh()
            if given.norm().item() > 8:
                break
        return given


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6), nn.SiLU())
        self.weigh = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(6, 2, 1), nn.ReLU(), nn.Conv2d(2, 6, 1), nn.Sigmoid()
        )

    def forward(self, picture: torch.Tensor) -> torch.Tensor:
        h = self.one(picture)
        return functional.relu(picture + h * self.weigh(h)).square().mean()


class Shuffle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv2d(8, 8, 1, groups=2)
        self.two = nn.Conv2d(8, 8, 3, padding=1, groups=8)

    def forward(self, picture: torch.Tensor) -> torch.Tensor:
        h = functional.channel_shuffle(self.one(picture), 2)
        return functional.hardswish(self.two(h)).square().mean()


class Wave(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            parametrizations.weight_norm(nn.Conv1d(4, 8, 2, dilation=2**i)) for i in range(3)
        )
        self.out = nn.Conv1d(4, 4, 1)

    def forward(self, sound: torch.Tensor) -> torch.Tensor:
        h = sound
        for i, layer in enumerate(self.layers):
            # Padding on the left only: no output depends on later samples.
            one, two = layer(functional.pad(h, (2**i, 0))).chunk(2, 1)
            h = h + one.tanh() * two.sigmoid()
        return functional.smooth_l1_loss(self.out(h)[..., :-1], sound[..., 1:])


class Contrast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(8, 5)
        self.two = nn.Linear(8, 5)

    def forward(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        far = torch.cdist(functional.normalize(self.one(first)), self.two(second).roll(1, 0))
        return (far.logsumexp(-1) - far.diagonal()).mean() + far.amin(1).mean()


class Variational(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(8, 6)
        self.out = nn.Linear(3, 8)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        mean, wide = self.one(given).chunk(2, -1)
        wide = functional.softplus(wide)
        known = torch.distributions.Normal(torch.zeros_like(mean), torch.ones_like(mean))
        gap = (
            torch.distributions.kl_divergence(torch.distributions.Normal(mean, wide), known)
            .sum(-1)
            .mean()
        )
        # Decode the mean: a random sample could not be compared with eager's.
        return functional.mse_loss(self.out(mean), given) + 0.1 * gap


class Table(nn.Module):
    """A net over the rows of a table: two dimensions, biases and learned shifts one after another."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds = nn.Embedding(3, 8)
        self.one = nn.Linear(8, 8)
        self.two = nn.Linear(8, 8, bias=False)
        self.out = nn.Linear(8, 1)
        self.shift = nn.Parameter(torch.randn(8))
        self.register_buffer("middle", torch.randn(8))

    def forward(
        self, rows: torch.Tensor, kinds: torch.Tensor, wanted: torch.Tensor
    ) -> torch.Tensor:
        hidden = self.one(rows + self.kinds(kinds)) + self.shift
        hidden = (self.two(hidden.relu()) + self.shift.exp() + self.middle).relu()
        found = self.out(hidden) + self.shift[:1]
        return functional.mse_loss(found.squeeze(1), wanted)
