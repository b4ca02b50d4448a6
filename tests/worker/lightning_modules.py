"""LightningModules and data for tests: Lightning's own demos, and one that uses more of its API."""

from __future__ import annotations

from typing import Any

import lightning
import torch
from lightning.pytorch.demos.boring_classes import BoringModel, DemoModel, Net
from lightning.pytorch.demos.lstm import LightningLSTM
from lightning.pytorch.demos.transformer import LightningTransformer
from torch import nn

__all__ = ["BoringModel", "Net", "demo", "images", "lstm", "rows", "transformer", "words"]

# The hooks of Digits, in the order of their calls.
CALLED: list[str] = []


def rows(count: int = 32, seed: int = 0) -> list[torch.Tensor]:
    """Return samples of BoringModel, each one tensor."""
    return list(torch.randn(count, 32, generator=torch.Generator().manual_seed(seed)))


def images(count: int = 32, seed: int = 0) -> list[tuple[torch.Tensor, int]]:
    """Return images of 28 x 28 as MNIST's, with classes that a model can learn."""
    some = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (count,), generator=some)
    pixels = torch.randn(count, 1, 28, 28, generator=some) + labels[:, None, None, None] / 5
    return list(zip(pixels, labels.tolist()))


def words(count: int = 32, seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return rows of 50 words, each with its words shifted by one."""
    some = torch.Generator().manual_seed(seed)
    return [(row[:-1], row[1:]) for row in torch.randint(50, (count, 9), generator=some)]


def without_dropout(module: nn.Module) -> Any:
    """Set all dropout of a module to 0, as its random numbers are the run's own."""
    for each in module.modules():
        for name in ("p", "dropout"):
            if isinstance(getattr(each, name, None), float):
                setattr(each, name, 0.0)
    return module


def demo() -> Any:
    """Return Lightning's DemoModel."""
    return DemoModel()


def transformer() -> Any:
    """Return Lightning's transformer of 50 words."""
    module: Any = LightningTransformer(50)
    module.model = without_dropout(type(module.model)(50, ninp=32, nhead=2, nhid=32, nlayers=1))
    # It would download.
    module.prepare_data = lambda: None
    # At its own rate of 0.1 a difference of 1e-7 in the weights is one of 2e-4 in the sixth loss.
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), 0.01)
    return module


def lstm() -> Any:
    """Return Lightning's LSTM of 50 words, which keeps its state from one pass to the next."""
    module: Any = LightningLSTM(50)
    module.prepare_data = lambda: None
    module.model = without_dropout(type(module.model)(50, 8, 8, 1))
    return module


class Digits(lightning.LightningModule):
    """Lightning's demo network for MNIST with logged values, groups, a scheduler and hooks."""

    def __init__(self, rate: float = 0.01) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net: Any = without_dropout(Net())

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        images, labels = batch
        scores = self.net(images)
        loss = nn.functional.nll_loss(scores, labels)
        self.log("train_accuracy", (scores.argmax(1) == labels).float().mean(), prog_bar=True)
        self.log_dict({"doubled": loss * 2})
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        images, labels = batch
        scores = self.net(images)
        self.log("val_loss", nn.functional.nll_loss(scores, labels))
        self.log("val_accuracy", (scores.argmax(1) == labels).float().mean())
        CALLED.append(f"validation {batch_idx}")

    def on_validation_epoch_end(self) -> None:
        self.log("checked", float(self.global_step))

    def on_train_epoch_start(self) -> None:
        CALLED.append(f"start {self.current_epoch} {self.global_step}")

    def on_train_epoch_end(self) -> None:
        CALLED.append(f"end {self.current_epoch} {self.global_step}")

    def configure_optimizers(self) -> Any:
        biases = [each for name, each in self.named_parameters() if name.endswith("bias")]
        others = [each for name, each in self.named_parameters() if not name.endswith("bias")]
        groups = [{"params": others}, {"params": biases, "weight_decay": 0.0, "lr": 0.002}]
        optimizer = torch.optim.AdamW(groups, lr=self.hparams["rate"])
        steps = int(self.trainer.estimated_stepping_batches)
        cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.02, 0.004], total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": cycle, "interval": "step"}}


class Manual(BoringModel):
    """A module that would step its optimizers itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Ranked(BoringModel):
    """A module with a hook that a run does not call."""

    def on_after_backward(self) -> None: ...


class Indexed(BoringModel):
    """A module whose pass depends on its index."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.step(batch) * (1.0 if batch_idx % 2 else 2.0)


class Stepped(BoringModel):
    """A module whose pass depends on the step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.step(batch) * (1.0 + self.global_step)


class Counted(BoringModel):
    """A module that logs a number of Python, which a graph would keep."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.step(batch)
        self.log("twice", 2.0 * float(loss))
        return loss


class Several(BoringModel):
    """A module that logs several numbers as one."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("rows", batch[:, 0])
        return self.step(batch)


class Configured(BoringModel):
    """A module with an optimizer or scheduler that a run does not take."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def configure_optimizers(self) -> Any:
        weights = self.parameters()
        if self.how == "two":
            return [torch.optim.SGD([each], 0.1) for each in weights]
        if self.how == "part":
            return torch.optim.SGD([self.layer.weight], 0.1)
        if self.how == "other":
            return torch.optim.Adagrad(weights, 0.1)
        optimizer = torch.optim.SGD(weights, 0.1)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": plateau, "monitor": "loss"}


class Blind(lightning.LightningModule):
    """A module without validation_step, whose training_step takes no index."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 2)

    def training_step(self, batch: Any) -> Any:
        return self.layer(batch).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)
