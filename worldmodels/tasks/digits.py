"""Digits that are turned and moved: one rule for each operation (NPS's MNIST transformations)."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor, nn

from ..core import RuleCore
from ..data import digits as data
from ..errors import UserError
from ..models.picture import OPERATION, PICTURE, PictureChange
from ..report import figures, rules
from . import Batch, CoreBuilder, refuse_nothing

_SLOT_SIZE = 100  # the paper's
_AT_ONCE = 500  # examples of an evaluation, so that memory stays bounded
_SHOWN = 6  # digits of the demonstration

PUBLISHED = {"NPS, four rules": ("0.02", "100.0 %")}
"""Goyal et al. 2021, section 4.1 and Table 1: the error, and the share of examples that use their operation's own rule."""


class DigitTransformations:
    """Turn or move a digit as one is told, with a rule for each of four operations.

    Goyal et al. 2021, "Neural Production Systems", section 4.1, Table 1 and appendix C; see ``data.digits`` for the
    operations and ``models.picture`` for the two slots. Training draws digits and operations anew at every step; the test is
    a fixed draw of test digits. ``purity``: the share of examples that use their operation's most used rule. ``matched``: the
    same where every operation must have a rule of its own, by the best assignment.

    Args:
        digits: MNIST as ``mnist.npz``; None for scikit-learn's digits.
        image_size: pixels on a side of a frame, a multiple of 8 from 32 on.
        test_size: test examples; 20,000 in the paper's Table 1.
        test_seed: of the test examples.
    """

    name = "digits"
    sections = ()
    tags = ("task", "task/score")
    unit = "sequences"

    def __init__(
        self,
        *,
        digits: str | Path | None = None,
        image_size: int = 64,
        test_size: int = 20_000,
        test_seed: int = 3,
    ):
        refuse_nothing(test_size=test_size)
        if image_size < 32 or image_size % 8:
            raise UserError(f"task.image_size={image_size}; expected a multiple of 8 from 32 on, for digits of 28 x 28")
        self.path = None if digits is None else Path(digits)
        self.image_size, self.test_size, self.test_seed = image_size, test_size, test_seed
        self._read: tuple[Tensor, Tensor] | None = None

    # Data.

    def digits(self) -> tuple[Tensor, Tensor]:
        """The digits of training and test."""
        if self._read is None:
            self._read = data.digits(self.path)
        return self._read

    def collect(self, *, quiet: bool = False) -> None:
        """Read the digits."""
        self.digits()

    def about(self) -> dict[str, Any]:
        """The checksums of the digits."""
        return {
            "data": {part: data.checksum(found) for part, found in zip(("train", "test"), self.digits(), strict=True)}
        }

    def batches(self, batch_size: int, device: torch.device) -> Callable[[torch.Generator], Batch]:
        """Frames ``(B, 1, S, S)``, operations ``(B,)``, and the frames after them, made on the device."""
        pictures = self.digits()[0].to(device)

        def draw(generator: torch.Generator) -> Batch:
            return data.examples(pictures, self.image_size, *data.drawn(len(pictures), batch_size, generator))

        return draw

    # Model and loss.

    def model(self, core: CoreBuilder, about: Mapping[str, Any]) -> PictureChange:
        """A ``PictureChange``; refuses a core whose rules would see the operation."""
        built = core(2 * _SLOT_SIZE, num_tokens=2, num_slots=2, slot_size=_SLOT_SIZE)
        if not built.capabilities.rules or built.capabilities.memory:
            raise UserError(
                f"digits need a core that applies rules to slots, like core=snps or core=routing; got {type(built).__name__}"
            )
        if cast(RuleCore, built).rules_see != "slot":
            raise UserError("rules that see the operation need not differ from each other; set core.rules_see=slot")
        if built.slot_size != _SLOT_SIZE:
            raise UserError(f"core.slot_size={built.slot_size}; tokens of this task are for slots of {_SLOT_SIZE}")
        return PictureChange(built, self.image_size, len(data.OPERATIONS))

    def losses(self, model: nn.Module, batch: Batch, generator: torch.Generator) -> dict[str, Tensor]:
        """The mean binary cross-entropy of the pixels after the operation."""
        before, operation, after = batch
        return {"loss": F.binary_cross_entropy_with_logits(model(before, operation), after)}

    # Scores.

    @torch.no_grad()
    def evaluate(self, model: PictureChange, limit: int | None = None, *, quiet: bool = True) -> dict[str, Any]:
        """The squared error of pixels beside that of copying, and which rule was used for which operation."""
        device = next(model.parameters()).device
        pictures = self.digits()[1]
        count = min(limit or self.test_size, self.test_size)
        chain = data.drawn(len(pictures), self.test_size, torch.Generator().manual_seed(self.test_seed))
        pictures = pictures.to(device)
        errors = {"model": 0.0, "copy": 0.0, "black": 0.0}
        said, told, right = [], [], 0
        for part in torch.arange(count).split(_AT_ONCE):
            before, operation, after = data.examples(
                pictures, self.image_size, *(drawn[part].to(device) for drawn in chain)
            )
            answers = {"model": model(before, operation).sigmoid(), "copy": before, "black": torch.zeros_like(after)}
            for name, answer in answers.items():
                errors[name] += float((answer - after).square().mean((1, 2, 3)).double().sum()) / count
            tokens = model.tokens(before, operation)
            chosen = model.core.explain(model.core.prepare(tokens), model.core.initial_state(len(part)))
            rule = chosen["rule"][:, 0]
            if rule.dim() == 2:  # a rule for each slot
                rule = rule[:, OPERATION]
            elif "primary" in chosen:
                rule = torch.where(chosen["primary"][:, 0] == OPERATION, rule, -1)
            context = chosen["context"][:, 0] if "context" in chosen else torch.full_like(rule, PICTURE)
            right += int(((context[:, OPERATION] if context.dim() == 2 else context) == PICTURE).sum())
            said.append(rule.cpu())
            told.append(operation.cpu())
        rule = torch.cat(said)
        num_rules = max(int(rule.max()) + 1, cast(RuleCore, model.core).num_rules)
        used = rules.uses(torch.cat(told), rule, len(data.OPERATIONS), num_rules)
        scores = {"mse": errors["model"], "purity": used["purity"], "matched": used["matched"]}
        scores["read_picture"] = right / count
        told_of = {"copy_mse": errors["copy"], "black_mse": errors["black"], "uses": used["uses"], "null": used["null"]}
        return {"scores": scores, **told_of, "n": count}

    def objective(self, result: Mapping[str, Any]) -> float:
        """Minus the mean squared error."""
        return -float(result["scores"]["mse"])

    # Tables and pictures.

    def table(self, results: Mapping[str, Mapping[str, Any]], of: str) -> Table:
        """Errors and shares, then how often each rule was used for each operation."""
        title = f"{of}: squared error of pixels (copy: the digit as it was; black: an empty frame), and rules"
        errors = {
            "error": lambda result: f"{result['scores']['mse']:.4f}",
            "copy": lambda result: f"{result['copy_mse']:.4f}",
            "black": lambda result: f"{result['black_mse']:.4f}",
        }
        return rules.table(results, title, data.OPERATIONS, errors, PUBLISHED)

    @torch.no_grad()
    def draw(
        self,
        model: PictureChange,
        result: Mapping[str, Any],
        metrics: Sequence[Mapping[str, Any]],
        folder: Path,
        example: int,
    ) -> list[Path]:
        """The table of operations and rules, and digits after every operation, true and said (Fig. 7)."""
        pictures = self.digits()[1]
        if example >= len(pictures):
            raise UserError(f"example {example} was asked for; there are {len(pictures)} test digits")
        device = next(model.parameters()).device
        shown = data.framed(pictures[example : example + _SHOWN], self.image_size).to(device)
        columns = [shown]
        for operation in range(len(data.OPERATIONS)):
            told = torch.full((len(shown),), operation, device=device)
            columns += [data.transformed(shown, told), model(shown, told).sigmoid()]
        return [
            *figures.curves(metrics, folder / "curves.png"),
            rules.draw(data.OPERATIONS, result["uses"], folder / "rules.png"),
            _draw_digits([column[:, 0].cpu().numpy() for column in columns], folder / "digits.png"),
        ]


def _draw_digits(columns: Sequence[np.ndarray], path: Path) -> Path:
    """A row for each digit: the digit, then for every operation what is true and what was said."""
    titles = ["digit"]
    for operation in data.OPERATIONS:
        titles += [f"{operation}:\ntrue", "said"]
    rows = len(columns[0])
    figure = figures.blank(0.95 * len(columns), 0.95 * rows + 0.5, layout="constrained")
    axes = figure.subplots(rows, len(columns), squeeze=False)
    for (row, column), axis in np.ndenumerate(axes):
        axis.imshow(columns[column][row], cmap="gray", vmin=0, vmax=1)
        axis.set(xticks=[], yticks=[])
        if row == 0:
            axis.set_title(titles[column], fontsize=7)
    return figures.save(figure, path)
