"""Images of shapes, drawn here, and the Vision Transformer that tells them apart."""

import torch
from transformers import ViTConfig, ViTForImageClassification

SHAPES = ("circle", "square", "triangle", "cross")
SIZE = 32


def model(hidden, layers):
    """From random weights; ViTForImageClassification.from_pretrained(FOLDER, num_labels=4) takes trained ones."""
    config = ViTConfig(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=4, intermediate_size=4 * hidden,
        image_size=SIZE, patch_size=4, num_labels=len(SHAPES), id2label=dict(enumerate(SHAPES)),
    )  # fmt: skip
    return ViTForImageClassification(config)


class Images:
    """Each is drawn when it is asked for, the same every time."""

    def __init__(self, samples, seed):
        self.samples, self.seed = samples, seed

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        x, y, radius, angle = torch.rand(4, generator=generator).tolist()
        label = index % len(SHAPES)
        inside = _inside(SHAPES[label], 12 + 8 * x, 12 + 8 * y, 7 + 4 * radius, angle - 0.5)
        colour = 0.5 + torch.rand(3, 1, 1, generator=generator)
        image = inside * colour + 0.2 * torch.randn(3, SIZE, SIZE, generator=generator)
        return {"pixel_values": image, "labels": torch.tensor(label)}


def _inside(shape, x, y, radius, angle):
    """Which points a turned shape covers."""
    row, column = torch.meshgrid(torch.arange(SIZE) - y, torch.arange(SIZE) - x, indexing="ij")
    turn = torch.tensor(angle)
    u, v = row * turn.cos() - column * turn.sin(), row * turn.sin() + column * turn.cos()
    if shape == "circle":
        return u * u + v * v < radius * radius
    if shape == "square":
        return torch.maximum(u.abs(), v.abs()) < 0.9 * radius
    if shape == "triangle":
        return (v > -0.6 * radius) & (1.73 * u.abs() + v < 1.1 * radius)
    return (torch.minimum(u.abs(), v.abs()) < 0.3 * radius) & (
        torch.maximum(u.abs(), v.abs()) < radius
    )


def data(samples, seed=0):
    return Images(samples, seed)
