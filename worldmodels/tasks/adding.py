"""Adding numbers: SCOFF's task."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor, nn

from ..data import sequences as data
from ..errors import UserError
from ..models.sequence import SequenceSum
from ..report import figures
from ..report.choices import draw_choices
from . import Batch, CoreBuilder, refuse_equal_seeds, refuse_nothing, require_memory

_EVALUATION_BATCH = 1000
_SHOWN = 50  # steps of a long sequence that a choice map shows


class Adding:
    """Add the marked numbers of a long sequence, more of them and over a longer time than ever trained.

    Goyal et al. 2020, "Object Files and Schemata" (SCOFF), appendix B, Tables 2 and 3. Numbers are U[0, 1]; see
    ``data.sequences.adding`` for where the marked ones lie. Training: a fixed set, an equal share for each of
    ``train_counts``. Test: a fixed set for each of ``test_counts``. The error is the mean squared one.

    The paper does not say how numbers enter and sums leave. Here a step is one token, a linear map of the number and its
    mark; the sum is a linear readout of all slots.

    Args:
        train_counts: how many numbers are added in training.
        train_length: of training sequences.
        train_size: training sequences in all.
        train_seed: of the training set.
        test_counts: how many numbers are added in the test.
        test_length: of test sequences.
        test_size: test sequences for each count.
        test_seed: of the test sets.
        token_size: what number and mark are embedded to.
    """

    name = "adding"
    sections = ()
    tags = ("task", "task/score")
    unit = "sequences"

    def __init__(
        self,
        *,
        train_counts: Sequence[int] = (2, 4),
        train_length: int = 50,
        train_size: int = 50_000,
        train_seed: int = 1,
        test_counts: Sequence[int] = (2, 3, 4, 5, 8, 9, 10),
        test_length: int = 200,
        test_size: int = 20_000,
        test_seed: int = 3,
        token_size: int = 32,
    ):
        refuse_equal_seeds(train_seed, test_seed)
        refuse_nothing(train_size=train_size, test_size=test_size, token_size=token_size)
        for counts, length in ((train_counts, train_length), (test_counts, test_length)):
            if not counts or min(counts) < 1 or max(counts) > length:
                raise UserError(f"{list(counts)} numbers of {length} cannot be added; give counts from 1 to the length")
        self.train_counts, self.test_counts = list(train_counts), list(test_counts)
        self.train_length, self.test_length = train_length, test_length
        self.train_size, self.test_size = train_size, test_size
        self.train_seed, self.test_seed = train_seed, test_seed
        self.token_size = token_size

    def collect(self, *, quiet: bool = False) -> None:
        """Nothing: sequences are made as they are needed."""

    def about(self) -> dict[str, Any]:
        """Nothing: the options say it all."""
        return {}

    def model(self, core: CoreBuilder, about: Mapping[str, Any]) -> SequenceSum:
        """A ``SequenceSum``; without other sizes the core has five slots of 60, the paper's 300 units."""
        built = core(self.token_size, num_tokens=1, num_slots=5, slot_size=60)
        require_memory(built, "the adding task")
        return SequenceSum(built, self.token_size)

    def batches(self, batch_size: int, device: torch.device) -> Callable[[torch.Generator], Batch]:
        """Sequences ``(B, T, 2)`` and their sums."""
        share = -(-self.train_size // len(self.train_counts))
        sets = [
            data.adding(share, self.train_length, count, data.generator(self.train_seed, count))
            for count in self.train_counts
        ]
        return data.drawn(tuple(torch.cat(parts) for parts in zip(*sets, strict=True)), batch_size, device)

    def losses(self, model: nn.Module, batch: Batch, generator: torch.Generator) -> dict[str, Tensor]:
        """The mean squared error."""
        sequences, target = batch
        return {"loss": F.mse_loss(model(sequences), target)}

    @torch.no_grad()
    def evaluate(self, model: SequenceSum, limit: int | None = None, *, quiet: bool = True) -> dict[str, Any]:
        """The error for each count, beside that of always saying the mean sum in training, and the mean sum of that count."""
        device = next(model.parameters()).device
        training_mean = sum(self.train_counts) / len(self.train_counts) / 2
        size = min(limit or self.test_size, self.test_size)
        errors = {}
        for count in self.test_counts:
            sequences, target = data.adding(size, self.test_length, count, data.generator(self.test_seed, count))
            pred = torch.cat([model(part.to(device)).cpu() for part in sequences.split(_EVALUATION_BATCH)])
            errors[str(count)] = {
                "mse": float(F.mse_loss(pred, target)),
                "training_mean": float((target - training_mean).square().mean()),
                "own_mean": float((target - count / 2).square().mean()),
            }
        scores = {f"mse/{count}": entry["mse"] for count, entry in errors.items()}
        return {"scores": scores, "errors": errors, "length": self.test_length, "n": size}

    def objective(self, result: Mapping[str, Any]) -> float:
        """Minus the mean over all counts of the logarithm of the error."""
        errors = torch.tensor([entry["mse"] for entry in result["errors"].values()], dtype=torch.float64)
        return -float(errors.clamp(min=1e-12).log10().mean())

    def table(self, results: Mapping[str, Mapping[str, Any]], of: str) -> Table:
        """Errors by count, the constant answers below."""
        table = Table("mean squared error", title=f"{of}: test data", title_justify="left")
        together: dict[str, Any] = {}  # the constant answers, of every count that any result has
        for result in results.values():
            together |= result["errors"]
        counts = sorted(together, key=int)
        for count in counts:
            trained = int(count) in self.train_counts
            table.add_column(f"{count} numbers" + ("\n(trained)" if trained else ""), justify="right")
        for name, result in results.items():
            errors = result["errors"]
            table.add_row(name, *(f"{errors[count]['mse']:.4f}" if count in errors else "" for count in counts))
        table.add_section()
        for key, name in (("training_mean", "mean sum of training"), ("own_mean", "mean sum of that count")):
            table.add_row(name, *(f"{together[count][key]:.4f}" for count in counts))
        return table

    @torch.no_grad()
    def draw(
        self,
        model: SequenceSum,
        result: Mapping[str, Any],
        metrics: Sequence[Mapping[str, Any]],
        folder: Path,
        example: int,
    ) -> list[Path]:
        """Error against count, and what the readout says on the way through one test sequence."""
        device = next(model.parameters()).device
        lines = {
            "the model": [entry["mse"] for entry in result["errors"].values()],
            "mean sum of training": [entry["training_mean"] for entry in result["errors"].values()],
            "mean sum of that count": [entry["own_mean"] for entry in result["errors"].values()],
        }
        counts = [int(count) for count in result["errors"]]
        written = [
            *figures.curves(metrics, folder / "curves.png", of="numbers to add"),
            figures.against(
                counts,
                lines,
                "numbers to add",
                f"mean squared error at length {result['length']}",
                folder / "errors.png",
            ),
        ]
        count = self.test_counts[-1]
        sequences, _ = data.adding(example + 1, self.test_length, count, data.generator(self.test_seed, count))
        sequence = sequences[example:]
        slots, _ = model.unroll(sequence.to(device))
        numbers, marks = sequence[0].unbind(-1)
        said = model.sums(slots)[:, 0].cpu()
        written.append(_draw_running_sum((numbers * marks).cumsum(0), said, marks > 0, folder / "running_sum.png"))
        shown = model.tokens(sequence[:, :_SHOWN].to(device))
        return written + draw_choices(model.core, shown, folder)


def _draw_running_sum(true: Tensor, said: Tensor, marked: Tensor, path: Path) -> Path:
    """What a model says on its way through a sequence, beside the sum so far; ``(T,)`` each."""
    figure = figures.blank(8, 3)
    axis = figure.subplots()
    axis.step(range(len(true)), true, where="post", color=figures.COLORS[1], label="sum so far")
    axis.plot(said, color=figures.COLORS[0], label="what the readout says")
    axis.scatter(marked.nonzero()[:, 0], true[marked], s=18, color=figures.COLORS[1], label="marked number", zorder=3)
    axis.set(xlabel="step", ylabel="sum", title="a test sequence: the sum of the marked numbers so far")
    figures.whole_numbers(axis)
    figures.legend(axis)
    return figures.save(figure, path)
