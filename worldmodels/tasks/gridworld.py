"""A grid world told as text: EntNet's task."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor, nn

from ..data import sequences as data
from ..errors import UserError, nearest
from ..models.memory_network import StoryMemory
from ..models.sequence import StoryReader
from ..report import figures
from ..report.choices import draw_choices
from . import Batch, CoreBuilder, refuse_nothing, require_memory

_EVALUATION_BATCH = 1000
MODELS = ("core", "memory_network")


class GridWorld:
    """Read what two agents on a grid do and say where they are: EntNet's world model task.

    Henaff et al. 2017, "Tracking the World State with Recurrent Entity Networks", section 5.1, Table 1, appendix B; see
    ``data.sequences.stories`` for the text. The answer is one of all words. The error is the share of wrong answers, over
    both questions.

    The paper does not say how many stories there are: training draws fresh ones at every step from the run's own generator,
    the test is a fixed set for each length.

    With ``variable_length`` training asks after every statement from the fourth on (a shorter story would lack an agent;
    the paper says "between 1 and 20"). The beginning of a long story is distributed as a short story is, so this is
    training on stories of 4 to ``length`` statements in equal shares, all at once.

    Args:
        length: T, statements of a story, the four that place the agents counted.
        variable_length: train on stories of all lengths up to ``length``.
        test_lengths: lengths in the test; None for ``length``; with ``variable_length`` 20, 30, ... 80 as well.
        test_size: test stories for each length.
        test_seed: of the test sets.
        word_size: of an embedding.
        reads: what a step of the core is, one of the "statements" or of the "words". The paper's EntNet reads statements; it
            does not say what its LSTM reads, and LSTMs for question answering usually read words.
        model: "core", or "memory_network" (``MemoryNetwork``), which needs no core, and which the paper compares with.
        hops: of the memory network; None for the paper's ``length - 2``.
    """

    name = "gridworld"
    sections = ()
    tags = ("task", "task/score")
    unit = "sequences"

    def __init__(
        self,
        *,
        length: int = 10,
        variable_length: bool = False,
        test_lengths: Sequence[int] | None = None,
        test_size: int = 5000,
        test_seed: int = 3,
        word_size: int = 20,
        reads: str = "statements",
        model: str = "core",
        hops: int | None = None,
    ):
        if model not in MODELS:
            raise UserError(f"task.model is {model!r}; {nearest(model, MODELS)}")
        if hops is not None:
            refuse_nothing(hops=hops)
        if reads not in ("statements", "words"):
            raise UserError(f"task.reads is {reads!r}; expected statements or words")
        refuse_nothing(test_size=test_size, word_size=word_size)
        lengths = [length] if not variable_length else sorted({length, *range(20, 81, 10)})
        self.test_lengths = list(test_lengths) if test_lengths is not None else lengths
        if min(length, *self.test_lengths) < data.SHORTEST_STORY:
            raise UserError(
                f"a story places two agents in its first {data.SHORTEST_STORY} statements; give longer ones"
            )
        self.reads = reads
        self.length = length
        self.variable_length = variable_length
        self.test_size, self.test_seed = test_size, test_seed
        self.word_size = word_size
        self.kind, self.hops = model, hops or length - 2

    def collect(self, *, quiet: bool = False) -> None:
        """Nothing: stories are told as they are needed."""

    def about(self) -> dict[str, Any]:
        """Nothing: the options say it all."""
        return {}

    def model(self, core: CoreBuilder, about: Mapping[str, Any]) -> StoryReader | StoryMemory:
        """A ``StoryReader``, without other sizes of a core of the paper's five slots of 20; or a ``StoryMemory``."""
        if self.kind == "memory_network":
            return StoryMemory(self.word_size, max(self.length, *self.test_lengths), hops=self.hops)
        num_tokens = data.STATEMENT_WORDS if self.reads == "statements" else 1
        built = core(self.word_size, num_tokens=num_tokens, num_slots=5, slot_size=20)
        require_memory(built, "the gridworld task")
        return StoryReader(built, self.word_size, self.reads)

    def batches(self, batch_size: int, device: torch.device) -> Callable[[torch.Generator], Batch]:
        """Fresh stories ``(T, B, 4)`` and where the agents are ``(T, B, 2)``."""
        return lambda generator: data.stories(batch_size, self.length, generator)

    def losses(self, model: nn.Module, batch: Batch, generator: torch.Generator) -> dict[str, Tensor]:
        """The cross-entropy of the answers, and their error."""
        words, where = batch
        first = data.SHORTEST_STORY - 1 if self.variable_length else self.length - 1
        scores = model(words, first)
        where = where[first:]
        error = (scores.argmax(-1) != where).float().mean()
        return {"loss": F.cross_entropy(scores.flatten(0, 2), where.flatten()), "error": error}

    @torch.no_grad()
    def evaluate(
        self, model: StoryReader | StoryMemory, limit: int | None = None, *, quiet: bool = True
    ) -> dict[str, Any]:
        """The error for each length, beside that of saying where the agents were placed."""
        device = next(model.parameters()).device
        size = min(limit or self.test_size, self.test_size)
        errors = {}
        for length in self.test_lengths:
            words, where = data.stories(size, length, data.generator(self.test_seed, length))
            parts = words.to(device).split(_EVALUATION_BATCH, dim=1)
            answers = torch.cat([model(part, length - 1)[0].argmax(-1) for part in parts]).cpu()
            errors[str(length)] = {
                "error": float((answers != where[-1]).double().mean()),
                "as_placed": float((where[0] != where[-1]).double().mean()),
            }
        scores = {f"error/{length}": entry["error"] for length, entry in errors.items()}
        return {"scores": scores, "errors": errors, "n": size}

    def objective(self, result: Mapping[str, Any]) -> float:
        """The share of right answers at the longest length."""
        longest = max(result["errors"], key=int)
        return 1.0 - float(result["errors"][longest]["error"])

    def table(self, results: Mapping[str, Mapping[str, Any]], of: str) -> Table:
        """Errors by length of the story; an empty cell is a length that was not asked."""
        table = Table("share of wrong answers", title=f"{of}: test data", title_justify="left")
        lengths = sorted({int(length) for result in results.values() for length in result["errors"]})
        for length in lengths:
            table.add_column(f"T = {length}", justify="right")
        placed: dict[str, str] = {}
        for name, result in results.items():
            cells = {length: f"{entry['error']:.4f}" for length, entry in result["errors"].items()}
            placed |= {length: f"{entry['as_placed']:.4f}" for length, entry in result["errors"].items()}
            table.add_row(name, *(cells.get(str(length), "") for length in lengths))
        table.add_section()
        table.add_row("as placed", *(placed[str(length)] for length in lengths))
        return table

    @torch.no_grad()
    def draw(
        self,
        model: StoryReader | StoryMemory,
        result: Mapping[str, Any],
        metrics: Sequence[Mapping[str, Any]],
        folder: Path,
        example: int,
    ) -> list[Path]:
        """The error against the length, if there are several, and one test story on its grid with the answers."""
        device = next(model.parameters()).device
        written = figures.curves(metrics, folder / "curves.png", of="statements")
        if len(self.test_lengths) > 1:
            lines = {
                "the model": [entry["error"] for entry in result["errors"].values()],
                "as placed": [entry["as_placed"] for entry in result["errors"].values()],
            }
            path = folder / "errors.png"
            written.append(
                figures.against(self.test_lengths, lines, "statements", "share of wrong answers", path, share=True)
            )
        length = self.test_lengths[0]
        words, where = data.stories(example + 1, length, data.generator(self.test_seed, length))
        words, where = words[:, example:], where[:, example:]
        answers = model(words.to(device), data.SHORTEST_STORY - 1).argmax(-1)[:, 0].cpu()
        written.append(_draw_story(data.tell(words[:, 0]), _cells(where[:, 0]), _cells(answers), folder / "story.png"))
        if isinstance(model, StoryMemory):
            return written
        return written + draw_choices(model.core, model.tokens(words.to(device)), folder)


def _cells(words: Tensor) -> Tensor:
    """Words as coordinates ``(..., 2)`` from 1 to 10; what is no location becomes (0, 0)."""
    index = words - data.LOCATIONS
    cells = torch.stack([index // data.GRID, index % data.GRID], dim=-1) + 1
    return torch.where(index[..., None] >= 0, cells, 0)


def _draw_story(lines: Sequence[str], where: Tensor, answers: Tensor, path: Path) -> Path:
    """A story as text, and on its grid the agents' paths with the model's answers after the last statement.

    Args:
        lines: the statements.
        where: ``(T, 2, 2)``, the cells of both agents after each.
        answers: ``(T - 3, 2, 2)``, the cells the model names after each from the fourth on.
        path: the file to write.
    """
    figure = figures.blank(8.5, 4.2)
    text, axis = figure.subplots(1, 2, width_ratios=(1, 1.6))
    text.axis("off")
    shown = lines if len(lines) <= 20 else [*lines[:10], "...", *lines[-9:]]
    text.text(0, 1, "\n".join(shown), va="top", family="monospace", fontsize=8)
    for agent in range(2):
        path_x, path_y = where[:, agent].float().T + 0.12 * (2 * agent - 1)
        axis.plot(
            path_x, path_y, color=figures.COLORS[agent], marker=".", label=f"agent{agent + 1}, from circle to square"
        )
        axis.scatter(path_x[0], path_y[0], s=60, facecolors="none", edgecolors=figures.COLORS[agent])
        axis.scatter(path_x[-1], path_y[-1], s=70, marker="s", color=figures.COLORS[agent])
        named = answers[-1, agent]
        if int(named.min()) > 0:
            axis.scatter(
                *named,
                s=160,
                marker="x",
                color=figures.COLORS[agent],
                label=f"where the model says agent{agent + 1} is",
            )
    right = (answers == where[3:]).all(-1).float().mean()
    axis.set(xlim=(0.4, 10.6), ylim=(0.4, 10.6), xticks=range(1, 11), yticks=range(1, 11), aspect="equal")
    axis.set_title(f"asked after every statement from the fourth on: {100 * right:.0f} % right", fontsize=9)
    axis.set(xlabel="x, cells", ylabel="y, cells")
    axis.grid(alpha=0.3)
    figures.legend(axis)
    return figures.save(figure, path)
