"""More nets written by hand, with operations whose gradients were wrong or are error-prone.

The cases have the form of those in nets.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

Case = tuple[nn.Module, list[Any]]
x = torch.randn


def ids(most: int, *sizes: int) -> torch.Tensor:
    return torch.randint(0, most, sizes)


def cases() -> dict[str, Callable[[], Case]]:
    """Return the cases by name."""
    return {
        "graph attention: two heads, scatter": lambda: (GraphAttention(), [x(9, 6), ids(9, 2, 20)]),
        "VAE: convolutions, reparametrized, BCE": lambda: (PictureVAE(), [torch.rand(4, 1, 8, 8), x(4, 3)]),
        "triplets: shared weights, the batch's hardest": lambda: (Triplets(), [x(6, 8), torch.arange(6) // 2]),
        "U-Net: nearest, odd sizes": lambda: (Halves(), [x(2, 3, 13, 11), ids(2, 2, 13, 11)]),
        "experts: top 2, by index_add, balanced": lambda: (Routed(), [x(10, 8)]),
        "transformer: rotary, ALiBi, shared keys": lambda: (Rotary(), [ids(20, 2, 7)]),
        "coupling flow: affine, logdet": lambda: (Coupling(), [x(6, 4)]),
        "tagger: CRF by logsumexp": lambda: (Tags(), [ids(20, 3, 6), ids(4, 3, 6), torch.tensor([6, 4, 1])]),
        "neural ODE: Runge-Kutta": lambda: (Ode(), [x(5, 4), x(5, 4)]),
        "sets: masked mean, GeM": lambda: (Sets(), [x(3, 5, 4), torch.arange(15).view(3, 5) < 8]),
        "table: sparsemax, GLU": lambda: (Table(), [x(8, 6), ids(2, 8)]),
        "CLIP: two towers, learned temperature": lambda: (Clip(), [x(5, 8), x(5, 6)]),
        "clicks: EmbeddingBags, pairwise products": lambda: (Dlrm(), [x(6, 4), ids(30, 3, 6, 2), ids(2, 6) * 1.0]),
        "pointers: GRU cells, masked softmax": lambda: (Pointers(), [x(3, 5, 2)]),
        "BYOL: a target without gradients": lambda: (Byol(), [x(6, 8), x(6, 8)]),
        "quantized: straight through, nearest code": lambda: (Codes(), [x(7, 6)]),
        "preferences: logsigmoid of what was chosen": lambda: (Preferences(), [ids(20, 4, 5), ids(20, 4, 5)]),
    }  # fmt: skip


class GraphAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.node = nn.Linear(6, 8, bias=False)
        self.edge = nn.Parameter(x(2, 8))

    def forward(self, nodes: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        h, (source, target) = self.node(nodes).view(-1, 2, 4), edges.unbind()
        scores = functional.leaky_relu(
            (torch.cat([h[source], h[target]], -1) * self.edge).sum(-1), 0.2
        )
        spots = target.unsqueeze(-1).expand_as(scores)
        most = torch.full((len(nodes), 2), -1e9).scatter_reduce(0, spots, scores, "amax")
        weights = (scores - most.gather(0, spots)).exp()
        total = torch.zeros(len(nodes), 2).scatter_add(0, spots, weights)
        weights = weights / total.gather(0, spots).clamp(min=1e-9)
        out = torch.zeros_like(h).index_add(0, target, h[source] * weights.unsqueeze(-1))
        # The maximum cancels in the softmax: only this term gives scatter_reduce a gradient. Nodes
        # without an edge keep -1e9, which the clamp removes.
        return (
            functional.elu(out.flatten(1)).square().mean()
            + 0.01 * most.clamp(min=-9).square().mean()
        )


class PictureVAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(
            nn.Conv2d(1, 4, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(64, 6)
        )
        self.up = nn.Sequential(
            nn.Linear(3, 64), nn.Unflatten(1, (4, 4, 4)), nn.ConvTranspose2d(4, 1, 4, 2, 1)
        )

    def forward(self, picture: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        mean, wide = self.down(picture).chunk(2, -1)
        # The noise is an input, so that both engines use the same.
        seen = self.up(mean + noise * (0.5 * wide).exp())
        gap = -0.5 * (1 + wide - mean.pow(2) - wide.exp()).sum(-1)
        return (
            # Large logits: a sigmoid computed before the log would lose precision.
            functional.binary_cross_entropy_with_logits(seen * 30, picture, reduction="sum")
            / len(picture)
            + gap.mean()
        )


class Triplets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, given: torch.Tensor, kind: torch.Tensor) -> torch.Tensor:
        h = functional.normalize(self.layers(given))
        # The diagonal is 0, where a square root has no finite gradient.
        far = torch.cdist(h, h)
        same = kind[:, None] == kind[None]
        # 9 is above every distance of unit vectors.
        hardest = far.masked_fill(~same, 0).amax(1) - far.masked_fill(same, 9.0).amin(1)
        plain = functional.pairwise_distance(h[::2], h[1::2]) + functional.cosine_similarity(
            h[::2], h[1::2]
        )
        return (
            functional.relu(hardest + 0.2).mean()
            + functional.triplet_margin_loss(h, h.roll(1, 0), h.flip(0))
            + plain.mean()
        )


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv2d(3, 4, 3, padding=1)
        self.two = nn.Conv2d(4, 4, 3, padding=1)
        self.out = nn.Conv2d(8, 2, 1)

    def forward(self, picture: torch.Tensor, kind: torch.Tensor) -> torch.Tensor:
        high = functional.relu6(self.one(picture))
        # Odd sizes are rounded down here, so the way back needs the exact size.
        low = self.two(functional.interpolate(high, scale_factor=0.5, mode="nearest"))
        wide = functional.interpolate(low, size=high.shape[-2:], mode="nearest")
        return functional.cross_entropy(
            self.out(torch.cat([high, wide], 1)), kind, torch.tensor([0.3, 1.0])
        )


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        shares = self.gate(given).softmax(-1)
        best, chosen = shares.topk(2)
        best = best / best.sum(-1, keepdim=True)
        out = torch.zeros_like(given)
        for number, expert in enumerate(self.experts):
            # The number of rows of an expert depends on values.
            row, place = torch.where(chosen == number)
            out = out.index_add(0, row, expert(given[row]).relu() * best[row, place].unsqueeze(-1))
        # Without a gradient: the balance term trains the gate through `shares`.
        used = functional.one_hot(chosen, 4).float().mean((0, 1))
        return (out - given).square().mean() + 0.1 * (used * shares.mean(0)).sum() * 4


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 16)
        self.scale = nn.Parameter(torch.ones(16))
        self.query = nn.Linear(16, 16, bias=False)
        # One key and one value head, shared by the four query heads.
        self.key_value = nn.Linear(16, 8, bias=False)
        self.register_buffer("slopes", torch.tensor([0.5, 0.25, 0.125, 0.0625]).view(4, 1, 1))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        h = self.words(words)
        length = words.shape[1]
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6) * self.scale
        place = torch.arange(length)
        angle = place[:, None] * 10000 ** (-torch.arange(0, 4, 2) / 4)
        q = self.turned(self.query(h).view(*words.shape, 4, 4).transpose(1, 2), angle)
        key, value = self.key_value(h).view(*words.shape, 1, 8).transpose(1, 2).chunk(2, -1)
        scores = (
            q @ self.turned(key, angle).mT / math.sqrt(4)
            - self.slopes * (place[:, None] - place).abs()
        )
        scores = scores.masked_fill(place[:, None] < place, float("-inf"))
        out = (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)
        scores = out @ self.words.weight.T
        return functional.cross_entropy(scores[:, :-1].flatten(0, 1), words[:, 1:].flatten())

    def turned(self, h: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
        one = h[..., ::2]
        two = h[..., 1::2]
        return torch.stack(
            [one * angle.cos() - two * angle.sin(), one * angle.sin() + two * angle.cos()], -1
        ).flatten(-2)


class Coupling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList(
            nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 4)) for _ in range(3)
        )

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        one = given[:, :2]
        two = given[:, 2:]
        volume = torch.zeros(len(given))
        for net in self.nets:
            scale, shift = net(one).split(2, -1)
            # Bounds the exponent below.
            scale = scale.tanh()
            one, two, volume = two * scale.exp() + shift, one, volume + scale.sum(-1)
        z = torch.cat([one, two], -1)
        return -(torch.distributions.Normal(0.0, 1.0).log_prob(z).sum(-1) + volume).mean()


class Tags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 4)
        self.steps = nn.Parameter(x(4, 4))
        self.first = nn.Parameter(x(4))

    def forward(
        self, words: torch.Tensor, tags: torch.Tensor, lengths: torch.Tensor
    ) -> torch.Tensor:
        scores = self.words(words)
        inside = torch.arange(words.shape[1]) < lengths[:, None]
        alpha = self.first + scores[:, 0]
        for place in range(1, 6):
            later = (alpha[:, :, None] + self.steps).logsumexp(1) + scores[:, place]
            # Past the end of a sentence alpha stays as it is.
            alpha = torch.where(inside[:, place, None], later, alpha)
        gold = (
            scores.gather(-1, tags[..., None]).squeeze(-1).masked_fill(~inside, 0).sum(-1)
            + self.first[tags[:, 0]]
        )
        gold = gold + (self.steps[tags[:, :-1], tags[:, 1:]] * inside[:, 1:]).sum(-1)
        return (alpha.logsumexp(-1) - gold).mean()


class Ode(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Softplus(), nn.Linear(8, 4))
        self.time = nn.Parameter(torch.tensor(1.0))

    def forward(self, start: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
        h = start
        # exp keeps the learned step positive.
        step = self.time.exp() / 4
        for _ in range(4):
            one = self.layers(h)
            two = self.layers(h + step / 2 * one)
            three = self.layers(h + step / 2 * two)
            h = h + step / 6 * (one + 2 * two + 2 * three + self.layers(h + step * three))
        return functional.mse_loss(h, end)


class Sets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 6)
        self.power = nn.Parameter(torch.tensor([3.0]))
        self.out = nn.Linear(12, 1)

    def forward(self, given: torch.Tensor, inside: torch.Tensor) -> torch.Tensor:
        h = self.one(given).relu()
        weight = inside.unsqueeze(-1)
        mean = (h * weight).sum(1) / weight.sum(1).clamp(min=1)
        # Clamped above 0: the gradient by the power contains log(h).
        general = (
            (h.clamp(min=1e-6).pow(self.power) * weight).mean(1).clamp(min=1e-6).pow(1 / self.power)
        )
        return self.out(torch.cat([mean, general], -1)).squeeze(-1).square().mean()


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.mask = nn.Linear(4, 6)
        self.steps = nn.Linear(6, 16)
        self.out = nn.Linear(4, 2)

    def forward(self, given: torch.Tensor, kind: torch.Tensor) -> torch.Tensor:
        h = self.norm(given)
        prior = torch.ones_like(given)
        state = torch.zeros(len(given), 4)
        total = torch.zeros(len(given), 4)
        for _ in range(2):
            mask = self.sparsemax(self.mask(state) * prior)
            prior = prior * (1.3 - mask)
            state, used = functional.glu(self.steps(h * mask)).chunk(2, -1)
            total = total + used.relu()
        return functional.cross_entropy(self.out(total), kind)

    def sparsemax(self, h: torch.Tensor) -> torch.Tensor:
        ordered = h.sort(-1, descending=True)[0]
        count = torch.arange(1, h.shape[-1] + 1)
        sums = ordered.cumsum(-1) - 1
        size = (ordered * count > sums).sum(-1, keepdim=True)
        # `size` is at least 1: the largest entry always satisfies the condition.
        return (h - sums.gather(-1, size - 1) / size).clamp(min=0)


class Clip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(8, 4)
        self.two = nn.Linear(6, 4, bias=False)
        # About log(1 / 0.07), the initial value of CLIP.
        self.scale = nn.Parameter(torch.tensor(2.6))

    def forward(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        one = functional.normalize(self.one(first), dim=-1)
        two = functional.normalize(self.two(second), dim=-1)
        scores = self.scale.exp().clamp(max=100) * one @ two.t()
        kind = torch.arange(len(first))
        return (
            functional.cross_entropy(scores, kind) + functional.cross_entropy(scores.t(), kind)
        ) / 2


class Dlrm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(30, 4, mode="sum") for _ in range(3))
        self.dense = nn.Linear(4, 4)
        # Four dense values and the six pairs of four vectors.
        self.out = nn.Linear(10, 1)

    def forward(
        self, dense: torch.Tensor, items: torch.Tensor, clicked: torch.Tensor
    ) -> torch.Tensor:
        dense = self.dense(dense).relu()
        all_ = torch.stack(
            [dense, *(bag(given) for bag, given in zip(self.bags, items.unbind()))], 1
        )
        row, column = torch.tril_indices(4, 4, -1)
        pairs = torch.bmm(all_, all_.transpose(1, 2))[:, row, column]
        scores = self.out(torch.cat([dense, pairs], 1)).squeeze(1)
        return functional.binary_cross_entropy_with_logits(scores * 20, clicked)


class Pointers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.all = nn.GRU(2, 6, batch_first=True)
        self.step = nn.GRUCell(2, 6)
        self.key = nn.Linear(6, 6)
        self.query = nn.Linear(6, 6)
        self.score = nn.Parameter(x(6))

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        seen, state = self.all(points)
        state = state[0]
        given = points[:, 0]
        loss = torch.zeros(())
        taken = torch.zeros(points.shape[:2], dtype=torch.bool)
        for place in range(3):
            state = self.step(given, state)
            scores = (self.key(seen) + self.query(state).unsqueeze(1)).tanh() @ self.score
            shares = scores.masked_fill(taken, float("-inf")).log_softmax(-1)
            loss = loss - shares[:, place].mean()
            # A point can be chosen only once.
            taken = taken | (torch.arange(5) == place)
            given = (shares.exp().unsqueeze(-1) * points).sum(1)
        return loss


class Byol(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(8, 8)
        self.guess = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        query, key = self.one(first).chunk(2, -1)
        with torch.no_grad():
            target = self.one(second)[:, :4]
        near = functional.cosine_similarity(self.guess(query), target, dim=-1)
        spread = (1 - query.std(0)).relu().mean()
        # The detached factor gives a gradient to one half of the layer only.
        return 2 - 2 * near.mean() + spread + (query * key.detach()).mean()


class Codes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(6, 4)
        self.out = nn.Linear(4, 6)
        self.codes = nn.Embedding(5, 4)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        h = self.one(given)
        far = (
            h.pow(2).sum(1, keepdim=True)
            - 2 * h @ self.codes.weight.t()
            + self.codes.weight.pow(2).sum(1)
        )
        chosen = self.codes(far.argmin(1))
        loss = functional.mse_loss(chosen, h.detach()) + 0.25 * functional.mse_loss(
            h, chosen.detach()
        )
        # Straight through: the value is `chosen`, the gradient goes to `h`.
        return functional.mse_loss(self.out(h + (chosen - h).detach()), given) + loss


class Preferences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 8)
        self.out = nn.Linear(8, 20)

    def forward(self, chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
        gap = self.likely(chosen) - self.likely(rejected)
        return -functional.logsigmoid(40 * gap).mean()

    def likely(self, words: torch.Tensor) -> torch.Tensor:
        shares = self.out(self.words(words[:, :-1])).log_softmax(-1)
        return shares.gather(-1, words[:, 1:].unsqueeze(-1)).squeeze(-1).sum(-1)
