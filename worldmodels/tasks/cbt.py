"""A missing word of a children's book, chosen from candidates: the Children's Book Test."""

import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor, nn

from ..data import cbt
from ..data.sequences import drawn
from ..errors import UserError, nearest
from ..models.sequence import CandidateReader
from ..report import figures
from . import Batch, CoreBuilder, refuse_nothing

_EVALUATION_BATCH = 200

_PUBLISHED = {  # right answers to test questions in %, of named entities and common nouns
    "Kneser-Ney language model and cache": (43.9, 57.7),
    "LSTM, context and query": (41.8, 56.0),
    "window LSTM": (43.6, 58.2),
    "EntNet, general": (48.4, 54.0),
    "EntNet, simple": (61.6, 58.8),
    "MemNN, reads with the question": (49.3, 55.4),
    "MemNN with self-supervision": (66.6, 63.0),
}
"""Henaff et al. 2017, Table 4."""


class ChildrensBookTest:
    """Read twenty sentences of a book and choose the word that is missing from the next.

    Hill et al. 2016, "The Goldilocks Principle"; read as in Henaff et al. 2017, section 5.3: a step of the core is a window
    of words around a place where a candidate stands, the memories' keys are the candidates' embeddings, and the memory that
    fits the query is the answer. ``core=entnet core.keys=tied core.gate_masks=true``; the simple variant, which the paper
    found to be better, is ``core.simple=true core.normalise=false``.

    Args:
        data: the folder ``data`` of the official files.
        kind: of the missing word: "NE", named entities, "CN", common nouns, "V", verbs, or "P", prepositions.
        window: b, words of a window, odd; the paper's 5.
        word_size: of an embedding, which is the size of a memory; the paper does not give it.
        dropout: of features of embeddings, in training; the paper's 0.5.
        least: how often a word has to occur in the training data to be told from other rare ones; candidates always are.
    """

    name = "cbt"
    sections = ()
    tags = ("task", "task/score")
    unit = "questions"

    def __init__(
        self,
        *,
        data: str | Path | None = None,
        kind: str = "NE",
        window: int = 5,
        word_size: int = 100,
        dropout: float = 0.5,
        least: int = 2,
    ):
        if data is None:
            raise UserError("give task.data=FOLDER, the folder data of the Children's Book Test's official files")
        if kind not in cbt.KINDS:
            raise UserError(f"task.kind={kind}; {nearest(kind, cbt.KINDS)}")
        if window < 1 or window % 2 == 0:
            raise UserError(f"task.window={window}; expected an odd number, such as 5")
        if not 0 <= dropout < 1:
            raise UserError(f"task.dropout={dropout}; expected 0 or more, and less than 1")
        refuse_nothing(word_size=word_size, least=least)
        self.folder, self.kind, self.window, self.word_size = Path(data), kind, window, word_size
        self.dropout, self.least = dropout, least
        self._examples: dict[str, list[cbt.Example]] = {}
        self._windows: dict[str, cbt.Windows] = {}
        self._known: list[str] | None = None

    def collect(self, *, quiet: bool = False) -> None:
        """Read the files."""
        if not self._examples:
            self._examples = {part: cbt.read(file) for part, file in cbt.find(self.folder, self.kind).items()}

    def about(self) -> dict[str, Any]:
        """The vocabulary of the training data."""
        if self._known is None:
            self.collect()
            self._known = cbt.vocabulary(self._examples["train"], self.least)
        return {"vocabulary": self._known}

    def model(self, core: CoreBuilder, about: Mapping[str, Any]) -> CandidateReader:
        """A ``CandidateReader`` around an EntNet of ten memories; refuses another core, or keys that are not tied."""
        self._known = list(about["vocabulary"])
        built = core(self.word_size, num_tokens=self.window, num_slots=10, slot_size=self.word_size)
        if not getattr(built, "tied", False):
            raise UserError("the cbt task reads by memories whose keys are the candidates: core=entnet core.keys=tied")
        if built.slot_size != self.word_size:
            raise UserError(
                f"core.slot_size={built.slot_size}; candidates are the keys, so expected task.word_size={self.word_size}"
            )
        return CandidateReader(built, len(self._known) + 2, self.window, self.dropout)

    def _encoded(self, part: str) -> cbt.Windows:
        if part not in self._windows:
            known = self.about()["vocabulary"]
            self.collect()
            self._windows[part] = cbt.encode(self._examples[part], known, self.window)
        return self._windows[part]

    def batches(self, batch_size: int, device: torch.device) -> Callable[[torch.Generator], Batch]:
        """Examples drawn with replacement; see ``data.cbt.Windows``."""
        draw = drawn(tuple(self._encoded("train")), batch_size, device)
        return lambda generator: cbt.Windows(*draw(generator))

    def losses(self, model: nn.Module, batch: Batch, generator: torch.Generator) -> dict[str, Tensor]:
        """The cross-entropy of the candidates, and the share of right ones."""
        scores = model(batch)
        right = (scores.argmax(1) == batch.answers).float().mean()
        return {"loss": F.cross_entropy(scores, batch.answers), "accuracy": right}

    @torch.no_grad()
    def evaluate(self, model: nn.Module, limit: int | None = None, *, quiet: bool = True) -> dict[str, Any]:
        """The share of right answers to test and validation questions, and of the candidate that occurs most."""
        device = next(model.parameters()).device
        found: dict[str, Any] = {}
        for part in ("test", "validation"):
            held = cbt.Windows(*(each.to(device) for each in self._encoded(part)))
            n = min(limit or len(held.answers), len(held.answers))
            right = []
            for which in torch.arange(n, device=device).split(_EVALUATION_BATCH):
                batch = cbt.Windows(*(each[which] for each in held))
                right.append((model(batch).argmax(1) == batch.answers).double())
            examples = self._examples[part][:n]
            often = [max(e.candidates, key=e.passage.count) == e.answer for e in examples]
            found[part] = {"accuracy": float(torch.cat(right).mean()), "most_frequent": sum(often) / n, "n": n}
        scores = {"accuracy": found["test"]["accuracy"], "validation_accuracy": found["validation"]["accuracy"]}
        return {"scores": scores, **found, "kind": self.kind}

    def objective(self, result: Mapping[str, Any]) -> float:
        """The share of right answers to the validation questions."""
        return float(result["scores"]["validation_accuracy"])

    def table(self, results: Mapping[str, Mapping[str, Any]], of: str) -> Table:
        """Right answers, beside the most frequent candidate and the paper's figures."""
        table = Table("right answers, %", title=f"{of}: {self.kind}", title_justify="left")
        table.add_column("validation", justify="right")
        table.add_column("test", justify="right")
        for name, result in results.items():
            table.add_row(name, *(f"{100 * result[part]['accuracy']:.1f}" for part in ("validation", "test")))
        table.add_section()
        first = next(iter(results.values()))
        often = (f"{100 * first[part]['most_frequent']:.1f}" for part in ("validation", "test"))
        table.add_row("the candidate that occurs most", *often)
        if self.kind in ("NE", "CN"):
            for name, shares in _PUBLISHED.items():
                table.add_row(f"paper: {name}", "", f"{shares[cbt.KINDS.index(self.kind)]:.1f}")
        return table

    @torch.no_grad()
    def draw(
        self,
        model: CandidateReader,
        result: Mapping[str, Any],
        metrics: Sequence[Mapping[str, Any]],
        folder: Path,
        example: int,
    ) -> list[Path]:
        """A test question with the probability of each candidate, the right one in green."""
        held = self._encoded("test")
        if example >= len(held.answers):
            raise UserError(f"example {example} was asked for; there are {len(held.answers)} test questions")
        device = next(model.parameters()).device
        batch = cbt.Windows(*(each[example : example + 1].to(device) for each in held))
        asked = self._examples["test"][example]
        shares = torch.softmax(model(batch)[0], dim=0)[: len(asked.candidates)].tolist()
        figure = figures.blank(8.0, 0.3 * len(shares) + 1.2, layout="constrained")
        axis = figure.subplots()
        colors = ["tab:green" if word == asked.answer else "tab:gray" for word in asked.candidates]
        axis.barh(range(len(shares)), shares, color=colors)
        axis.set_yticks(range(len(shares)), [f"{word} ({asked.passage.count(word)} x)" for word in asked.candidates])
        axis.set(xlim=(0, 1), xlabel="probability; in green the right word")
        axis.set_title(textwrap.fill(" ".join(asked.query), 100), fontsize=9, loc="left")
        axis.invert_yaxis()
        return [
            *figures.curves(metrics, folder / "curves.png", of="questions"),
            figures.save(figure, folder / "question.png"),
        ]
