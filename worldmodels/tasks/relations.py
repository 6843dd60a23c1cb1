"""Relations between symbols never seen in training: ESBN's four tasks."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor, nn

from ..core import RecurrentCore, SequenceReader, Tokens, unroll
from ..data import sequences
from ..data import symbols as pictures
from ..data.relations import RULES, problems
from ..encoders import SYMBOL_ENCODERS, SymbolEncoder
from ..errors import UserError, nearest
from ..models.sequence import SymbolReader
from ..report import figures
from ..report.choices import draw_choices, trace
from . import Batch, CoreBuilder, refuse_equal_seeds, refuse_nothing, require_memory

_EVALUATION_BATCH = 1000
_NEEDED = {"same_different": 2}  # symbols that a problem is made of; 5 of all others

_MODELS = ("ESBN", "Transformer", "NTM", "MNM", "LSTM", "PrediNet", "RN")
_WITHHELD = (0, 50, 85, 95, 98)
PUBLISHED = {  # accuracy in % by rule, with normalisation and without, a line a model, by how many symbols are withheld
    "same_different": (
        """100 100 100 100 100, 100 100 100 100 72.3, 100 99.99 94.9 66.7 53.3, 100 99.95 97.8 72 52.3,
        100 99.97 96.9 69.4 54.8, 100 99.7 96 67.2 61.6, 100 100 100 99.9 66.8""",
        """50 50 50.1 49.8 50.1, 100 99.9 95.4 73.7 56.1, 99 98.6 84.9 57 52.5, 98.9 95.1 88.6 59.1 51.7,
        88.2 97 85.5 61.8 56.5, 100 99.9 97 90 68.5, 99.98 98.5 53.2 50.5 52.3""",
    ),
    "rmts": (
        """100 100 100 95, 100 99.98 99.1 79.8, 100 99.97 96.8 80.1, 99.99 99.9 98.7 50, 99.99 99.8 94.9 60.7,
        99.7 99.6 94.6 68.4, 100 99.99 99.5 79.6""",
        """86.4 69.4 50 51, 99.4 96.8 86.4 49.9, 99.5 92.5 81.2 50.1, 74.6 63.6 78.3 50, 99.1 90.2 80.9 50.2,
        54.9 50.1 65.9 49.7, 50.1 49.9 50.2 50""",
    ),
    "distribution_of_three": (
        """98.7 99 99.5 99.7, 88.7 95 92.7 32.1, 95.5 95.2 94.3 34, 94.7 93.6 90.6 32.2, 96 94.8 92.9 34.8,
        95.2 94.6 93.3 27.8, 35.6 50.6 72.2 26.5""",
        """99.98 97.4 92.4 62, 62.1 68.6 72.6 28, 92.9 87.1 78.2 26.7, 58.5 68.7 48.4 25.6, 91.3 85.3 71.6 27.5,
        75.1 65.7 78 25.7, 25.1 24.9 25.7 25.2""",
    ),
    "identity": (
        """99.6 99.6 99.9 99.2, 98.3 97.1 92 67.1, 98.2 97.8 93.9 64.9, 95.2 93.8 90.8 61.5, 98.9 97.7 92.1 62.5,
        93 92.8 89.8 59.9, 41.5 40.2 48.7 41.4""",
        """100 99.4 97.8 95.2, 75.5 71.6 85.4 38.6, 94.6 90.1 82.2 25, 70.9 69.5 49.8 24.9, 93.8 89.3 73.7 24.8,
        40.8 40.5 40.3 32.2, 41.1 37.3 31.6 25.4""",
    ),
}
"""Webb et al. 2021, Tables 9 to 12, means of ten networks."""


def published(rule: str, withheld: int, normalise: bool) -> dict[str, float]:
    """The paper's accuracy in % of every model, where it has one."""
    lines = PUBLISHED[rule][0 if normalise else 1].split(",")
    found = {}
    for model, line in zip(_MODELS, lines, strict=True):
        by_withheld = dict(zip(_WITHHELD, map(float, line.split()), strict=False))
        if withheld in by_withheld:
            found[model] = by_withheld[withheld]
    return found


class Relations:
    """Tell how symbols are related, of symbols most of which were never seen in training.

    Webb, Sinha & Cohen 2021, "Emergent Symbols through Binding in External Memory", section 4. Of n symbols m are withheld:
    training is on problems of the others, the test on problems of the withheld ones (``data.relations.problems``). Symbols
    are shown one after another, as pictures of 32 x 32, and the answer is one of two or four:

    - "same_different": a pair; is it twice the same?
    - "rmts", relational match to sample: a pair and two more; which of these is related as the first?
    - "distribution_of_three": three symbols, the same in another order but for the last, and four choices for it;
    - "identity": a row of the form ABA, ABB or AAA, another of the same form but for the last, and four choices for it.

    Encoded symbols are normalised over time, in RMTS each pair apart (section 3.1, ``TemporalContextNorm``).

    Args:
        rule: one of the four.
        withheld: m.
        symbols: a folder of PNGs, 32 x 32; None for a hundred glyphs of a font.
        encoder: "convolutions", "perceptron" or "random", see ``SymbolEncoder``.
        normalise: over time.
        train_size: training problems at most; None for the paper's, all of "same_different" and 10,000 else.
        train_seed: of the training problems, and of which symbols are withheld.
        test_size: test problems at most.
        test_seed: of the test problems.
    """

    name = "relations"
    sections = ()
    tags = ("task", "task/score")
    unit = "sequences"

    def __init__(
        self,
        *,
        rule: str = "same_different",
        withheld: int = 95,
        symbols: str | Path | None = None,
        encoder: str = "convolutions",
        normalise: bool = True,
        train_size: int | None = None,
        train_seed: int = 1,
        test_size: int = 10_000,
        test_seed: int = 3,
    ):
        if rule not in RULES:
            raise UserError(f"unknown rule task.rule={rule}; {nearest(rule, RULES)}")
        refuse_equal_seeds(train_seed, test_seed)
        refuse_nothing(test_size=test_size, **({} if train_size is None else {"train_size": train_size}))
        if withheld < 0:
            raise UserError(f"task.withheld={withheld}; expected 0 or more")
        self.rule, self.withheld, self.folder, self.normalise = rule, withheld, symbols, normalise
        if encoder not in SYMBOL_ENCODERS:
            raise UserError(f"task.encoder={encoder}; expected one of {', '.join(SYMBOL_ENCODERS)}")
        self.encoder = encoder
        self.train_size = train_size or (1 << 30 if rule == "same_different" else 10_000)
        self.train_seed, self.test_size, self.test_seed = train_seed, test_size, test_seed
        self.symbols: Tensor | None = None

    def collect(self, *, quiet: bool = False) -> None:
        """Read or draw the symbols; refuses to withhold so many that no problem can be made of the others."""
        self.symbols = pictures.glyphs() if self.folder is None else pictures.from_folder(self.folder)
        n, needed = len(self.symbols), _NEEDED.get(self.rule, 5)
        if n - self.withheld < needed or 0 < self.withheld < needed:
            raise UserError(
                f"task.withheld={self.withheld} of {n} symbols; {self.rule} needs {needed} for training and for the test, so "
                f"expected 0, or {needed} to {n - needed}"
            )

    def about(self) -> dict[str, Any]:
        """How many symbols there are."""
        if self.symbols is None:
            self.collect()
        assert self.symbols is not None
        return {"num_symbols": len(self.symbols)}

    def model(self, core: CoreBuilder, about: Mapping[str, Any]) -> SymbolReader:
        """A ``SymbolReader``; without other sizes a core has four slots as large as a symbol."""
        encoder = SymbolEncoder(self.encoder)
        rule = RULES[self.rule]
        built = core(encoder.size, num_tokens=1, num_slots=4, slot_size=encoder.size, length=rule.symbols)
        require_memory(built, "the relations task")
        symbols = self.symbols  # of a run that is opened they come with its weights
        if symbols is None:
            symbols = torch.zeros(about["num_symbols"], pictures.SIZE, pictures.SIZE, dtype=torch.uint8)
        return SymbolReader(built, encoder, symbols, rule.answers, rule.segments if self.normalise else None)

    def batches(self, batch_size: int, device: torch.device) -> Callable[[torch.Generator], Batch]:
        """Problems ``(B, T)`` of the symbols that training uses, their answers, and which symbols these are."""
        (shown, answers), _ = self._problems(self.about()["num_symbols"])
        used, shown = torch.unique(shown, return_inverse=True)
        draw, used = sequences.drawn((shown, answers), batch_size, device), used.to(device)
        return lambda generator: (*draw(generator), used)

    def _problems(self, num_symbols: int) -> tuple[Any, Any]:
        sizes = self.train_size, self.test_size, self.train_seed, self.test_seed
        return problems(self.rule, num_symbols, self.withheld, *sizes)

    def losses(self, model: nn.Module, batch: Batch, generator: torch.Generator) -> dict[str, Tensor]:
        """The cross-entropy and the core's own loss, if it has one, and the share of right answers."""
        shown, answers, used = batch
        scores, auxiliary = model(shown, used)
        right = (scores.argmax(1) == answers).float().mean()
        return {"loss": F.cross_entropy(scores, answers) + auxiliary, "accuracy": right}

    @torch.no_grad()
    def evaluate(self, model: SymbolReader, limit: int | None = None, *, quiet: bool = True) -> dict[str, Any]:
        """The share of right answers to test problems, and to training problems, which are not more than these."""
        found: dict[str, Any] = {}
        device = model.symbols.device
        for name, (shown, answers) in zip(("train", "test"), self._problems(len(model.symbols)), strict=True):
            shown, answers = shown[: limit or self.test_size], answers[: limit or self.test_size]
            said = torch.cat([model(part.to(device))[0].cpu() for part in shown.split(_EVALUATION_BATCH)])
            right = float((said.argmax(1) == answers).double().mean())
            found[name] = {"accuracy": right, "loss": float(F.cross_entropy(said, answers)), "n": len(answers)}
        return {
            "scores": {"accuracy": found["test"]["accuracy"], "training_accuracy": found["train"]["accuracy"]},
            **found,
            "chance": 1 / RULES[self.rule].answers,
            "rule": self.rule,
            "withheld": self.withheld,
            "normalised": self.normalise,
        }

    def objective(self, result: Mapping[str, Any]) -> float:
        """The share of right answers."""
        return float(result["scores"]["accuracy"])

    def table(self, results: Mapping[str, Mapping[str, Any]], of: str) -> Table:
        """Right answers in training and test, and the paper's below."""
        title = f"{of}: {self.rule}, {self.withheld} symbols withheld{'' if self.normalise else ', not normalised'}"
        table = Table("right answers, %", title=title, title_justify="left")
        table.add_column("training problems", justify="right")
        table.add_column("test problems", justify="right")
        for name, result in results.items():
            table.add_row(name, *(f"{100 * result[part]['accuracy']:.1f}" for part in ("train", "test")))
        table.add_section()
        table.add_row("chance", "", f"{100 / RULES[self.rule].answers:.1f}")
        for model, share in published(self.rule, self.withheld, self.normalise).items():
            table.add_row(f"paper: {model}", "", f"{share:.1f}")
        return table

    def overview(self, results: Mapping[str, Mapping[str, Any]], of: str) -> Table:
        """Right answers by rule and symbols withheld, mean and standard deviation over runs, and the paper's below."""
        groups: dict[str, dict[tuple[str, int], list[float]]] = {}
        for result in results.values():
            name = result["core"] + ("" if result["normalised"] else ", not normalised")
            column = result["rule"], result["withheld"]
            groups.setdefault(name, {}).setdefault(column, []).append(100 * result["test"]["accuracy"])
        columns = sorted(
            {column for cells in groups.values() for column in cells}, key=lambda c: ([*RULES].index(c[0]), c[1])
        )
        title = f"{of}: right answers to test problems, %: mean, standard deviation (runs)"
        table = Table("model", title=title, title_justify="left")
        for rule, withheld in columns:
            table.add_column(f"{rule}\n{withheld} withheld", justify="right")
        for name in sorted(groups):
            table.add_row(name, *(_spread(groups[name].get(column, [])) for column in columns))
        table.add_section()
        for normalise in sorted({result["normalised"] for result in results.values()}, reverse=True):
            for model in _MODELS:
                found = [published(*column, normalise).get(model) for column in columns]
                name = f"paper: {model}" + ("" if normalise else ", not normalised")
                table.add_row(name, *("" if share is None else f"{share:.1f}" for share in found))
        return table

    @torch.no_grad()
    def draw(
        self,
        model: SymbolReader,
        result: Mapping[str, Any],
        metrics: Sequence[Mapping[str, Any]],
        folder: Path,
        example: int,
    ) -> list[Path]:
        """A test problem with what the model says to each answer, and what the core chose on the way through it."""
        _, (shown, answers) = self._problems(len(model.symbols))
        if example >= len(shown):
            raise UserError(f"example {example} was asked for; there are {len(shown)} test problems")
        problem = shown[example : example + 1].to(model.symbols.device)
        shares = torch.softmax(model(problem)[0][0], dim=0).tolist()
        seen = model.symbols[problem[0]].cpu()
        written = [
            *figures.curves(metrics, folder / "curves.png"),
            _draw_problem(self.rule, seen, shares, int(answers[example]), folder / "problem.png"),
        ]
        if isinstance(model.core, SequenceReader):
            return written
        if {"keys", "values"} <= set(model.core.initial_state(1)):
            written.append(_draw_memory(model.core, model.tokens(problem), seen, folder / "memory.png"))
        return written + draw_choices(model.core, model.tokens(problem), folder)


def _spread(shares: Sequence[float]) -> str:
    if not shares:
        return ""
    spread = f" ± {np.std(shares, ddof=1):.1f}" if len(shares) > 1 else ""
    return f"{np.mean(shares):.1f}{spread} ({len(shares)})"


def _draw_memory(core: RecurrentCore, tokens: Tokens, seen: Tensor, path: Path) -> Path:
    """What ESBN wrote and read over a problem: how alike symbols are to it, what each step read, how alike its keys are.

    Args:
        core: one whose state holds "keys" and "values".
        tokens: of one problem, ``(T, 1, 1, F)``.
        seen: its symbols, ``(T, 32, 32)``.
        path: the file to write.
    """
    start = core.initial_state(1)
    reads = trace(core, tokens, start)["memory_read"][:, 0]
    _, state = unroll(core, tokens, start)
    T, places = len(tokens.features), state["keys"].shape[1]
    order = [t % places for t in range(max(0, T - places), T)]  # what a memory that is too small has lost is not drawn
    values, keys = (F.normalize(state[name][0, order], dim=-1) for name in ("values", "keys"))
    panels = {
        "values: how alike two symbols are": (values @ values.t(), "RdBu_r", -1.0, "cosine"),
        "what a step reads of what came before": (reads[-len(order) :][:, order], "Blues", 0.0, "weight"),
        "keys: how alike what is bound to them": (keys @ keys.t(), "RdBu_r", -1.0, "cosine"),
    }
    figure = figures.blank(11.0, 4.3, layout="constrained")
    strip = np.hstack([np.pad(symbol, 3, constant_values=255) for symbol in seen[T - len(order) :].numpy()])
    for axis, (title, (cells, colors, low, scale)) in zip(figure.subplots(1, 3), panels.items(), strict=True):
        shades = axis.imshow(cells.cpu().numpy(), cmap=colors, vmin=low, vmax=1.0)
        n = len(order)
        across = axis.inset_axes((0.0, 1.02, 1.0, 1.0 / n))
        down = axis.inset_axes((-1.02 / n - 0.02, 0.0, 1.0 / n, 1.0))
        for inset, picture in ((across, strip), (down, np.vstack(np.hsplit(strip, n)))):
            inset.imshow(picture, cmap="gray", aspect="auto")
            inset.set_axis_off()
        axis.set_axis_off()
        across.set_title(title, fontsize=9)
        figure.colorbar(shades, ax=axis, label=scale, shrink=0.7, location="bottom")
    return figures.save(figure, path)


_ROWS: dict[str, tuple[tuple[str, int], ...]] = {  # what the symbols of a problem are, a row each
    "same_different": (("pair", 2),),
    "rmts": (("sample", 2), ("first pair", 2), ("second pair", 2)),
    "distribution_of_three": (("first row", 3), ("second row", 2), ("choices", 4)),
    "identity": (("first row", 3), ("second row", 2), ("choices", 4)),
}


def _draw_problem(rule: str, seen: Tensor, shares: Sequence[float], right: int, path: Path) -> Path:
    """A problem as rows of symbols, and the probability of each answer; the right one is green."""
    rows = _ROWS[rule]
    figure = figures.blank(7.5, 1.0 * max(len(rows), 2) + 0.8, layout="constrained")
    widest = max(count for _, count in rows)
    parts: Any = figure.subfigures(1, 2, width_ratios=[4, 3])
    left, beside = parts
    axes = left.subplots(len(rows), widest, squeeze=False)
    symbols = iter(seen)
    for row, (name, count) in zip(axes, rows, strict=True):
        for column, axis in enumerate(row):
            axis.set_axis_off()
            if column < count:
                axis.imshow(next(symbols).numpy(), cmap="gray", vmin=0, vmax=255)
                if name == "choices":
                    axis.set_title(str(column + 1), fontsize=8, color="tab:green" if column == right else "black")
            elif name == "second row" and column == count:
                axis.text(0.5, 0.5, "?", ha="center", va="center", fontsize=16, transform=axis.transAxes)
        row[0].text(-0.25, 0.5, name, ha="right", va="center", fontsize=8, transform=row[0].transAxes)
    answers = {
        "same_different": ["different", "same"],
        "rmts": ["first pair", "second pair"],
    }.get(rule, [str(n + 1) for n in range(len(shares))])
    axis = beside.subplots()
    axis.barh(answers, shares, color=["tab:green" if n == right else "tab:gray" for n in range(len(shares))])
    axis.axvline(1 / len(shares), color="black", linewidth=0.8, linestyle=":", label="chance")
    axis.set(xlim=(0, 1), xlabel="probability", title="answers; green: the right one")
    axis.title.set_fontsize(9)
    axis.invert_yaxis()
    axis.legend(fontsize=8, loc="lower right")
    return figures.save(figure, path)
