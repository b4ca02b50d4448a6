"""A Vision Transformer from trained weights, and images in one folder a class: FOLDER/CLASS/*.jpg."""

from pathlib import Path

import torch
from PIL import Image
from transformers import AutoConfig, ViTForImageClassification


def model(pretrained, classes, lora=None, config=None):
    """Return the model with a new head.

    Args:
        pretrained: hub id or folder of a ViT; None with `config`: random weights.
        classes: number of classes.
        lora: rank of adapters on all linear layers; None: all weights are trained.
        config: fields of a config without trained weights.
    """
    if pretrained is None:
        made = ViTForImageClassification(AutoConfig.for_model("vit", num_labels=classes, **config))
    else:
        # The head of another number of classes is replaced.
        made = ViTForImageClassification.from_pretrained(
            pretrained, num_labels=classes, ignore_mismatched_sizes=True
        )
    if lora is None:
        return made
    from peft import LoraConfig, get_peft_model

    return get_peft_model(
        made,
        LoraConfig(
            r=lora,
            lora_alpha=2 * lora,
            target_modules="all-linear",
            exclude_modules=["classifier"],
            modules_to_save=["classifier"],
        ),
    )


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
