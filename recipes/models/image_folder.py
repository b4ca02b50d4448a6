"""Images in one folder a class: FOLDER/CLASS/*.jpg."""

from pathlib import Path

import torch
from PIL import Image


class Images:
    """The images of a folder, as ViT's published processor prepares them."""

    def __init__(self, folder, size):
        self.size = size
        self.classes = sorted(path.name for path in Path(folder).iterdir() if path.is_dir())
        self.files = [
            (path, label)
            for label, name in enumerate(self.classes)
            for path in sorted(Path(folder, name).iterdir())
        ]

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        path, label = self.files[index]
        with Image.open(path) as image:
            scaled = image.convert("RGB").resize((self.size, self.size), Image.Resampling.BILINEAR)
        points = torch.frombuffer(bytearray(scaled.tobytes()), dtype=torch.uint8)
        # From 0 to 255 to -1 to 1: mean and deviation are 0.5.
        pixels = points.view(self.size, self.size, 3).permute(2, 0, 1) / 127.5 - 1
        return {"pixel_values": pixels, "labels": torch.tensor(label)}


def data(folder, size=224):
    """Return the images of a folder, `size` points high and wide."""
    return Images(folder, size)
