"""Questions about stories: bAbI's twenty tasks."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor, nn

from ..data import babi, babi_world
from ..errors import UserError, nearest
from ..models.memory_network import MemoryNetwork
from ..models.sequence import QuestionReader
from ..report import figures
from ..report.choices import draw_choices, trace
from . import Batch, CoreBuilder, refuse_equal_seeds, refuse_nothing, require_memory

_EVALUATION_BATCH = 200
_PARTS = ("train", "validation", "test")
_FAILED = 0.05  # a task with a larger error counts as failed
MODELS = ("core", "memory_network")
ENCODINGS = ("positions", "bag")

_PUBLISHED = {  # error in % on tasks 1 to 20
    ("positions", 10_000): {
        "EntNet": "0 .1 4.1 0 .3 .2 0 .5 .1 .6 .3 0 1.3 0 0 .2 .5 .3 2.3 0",
        "MemN2N": "0 .3 2.1 0 .8 .1 2 .9 .3 0 0 0 0 .2 0 51.8 18.6 5.3 2.3 0",
    },
    ("bag", 10_000): {
        "EntNet": "0 1.2 9 31.8 3.5 0 .5 .3 0 0 0 0 .4 .1 12.1 0 40.5 45.7 74 0",
        "MemN2N": "0 .6 7 32.6 10.2 .2 10.6 2.6 .3 .5 0 0 0 .1 11.4 52.9 39.3 40.5 74.4 0",
    },
    ("positions", 1000): {
        "EntNet": ".7 56.4 69.7 1.4 4.6 30 22.3 19.2 31.5 15.6 8 .8 9 62.9 57.8 53.2 46.4 8.8 90.4 2.6",
        "MemN2N": "0 8.3 40.3 2.8 13.1 7.6 17.3 10 13.2 15.1 .9 .2 .4 1.7 0 1.3 51 11.1 82.8 0",
    },
}
"""Henaff et al. 2017, Tables 2, 5 and 6: the best of ten runs by their validation error."""


def published(encoding: str, questions: int) -> dict[str, list[float]]:
    """The paper's errors in % on all twenty tasks, by model, where it has them for such a setting."""
    near = 10_000 if questions > 2000 else 1000
    found = _PUBLISHED.get((encoding, near), {})
    return {f"paper: {model}": [float(error) for error in errors.split()] for model, errors in found.items()}


class Babi:
    """Read a story, sentence by sentence, and answer a question about it with one word.

    Weston et al. 2015, "Towards AI-Complete Question Answering", trained and tested as in Henaff et al. 2017, "Tracking the
    World State with Recurrent Entity Networks", section 5.2 and appendix A: one task at a time or all together, the last
    tenth of the training questions for validation. The error is the share of wrong answers; a task with more than 5 % is
    failed. The paper reports the best of ten runs by their validation error, and so does ``worldmodels report``.

    Args:
        number: of the task, 1 to 20, or "all".
        data: a folder of the official files, such as ``tasks_1-20_v1-2/en-10k``; None for stories of our own of a world of
            people, places and things, tasks 1, 2, 3, 6, 7 and 8 (``data.babi_world``). Where of one of these only the test
            file is in the folder, stories of our own are the training data.
        model: "core", a core that reads a sentence a step (``QuestionReader``), or "memory_network" (``MemoryNetwork``),
            which needs no core.
        encoding: of the words of a sentence: "positions", which masks or weights tell apart, or a "bag".
        sentences: of a story, the last that are read; None for the paper's 70, and 130 in task 3.
        word_size: of an embedding.
        train_questions: of our own stories.
        train_seed: of our own stories.
        test_questions: of our own stories.
        test_seed: of our own stories.
        validation: the share of the training questions that are for validation.
        entities: words whose embeddings are the keys of ``core=entnet core.keys=tied``, one a memory, as in the paper's
            appendix C, such as ``[football,milk,john,kitchen]``.
        hops: of the memory network.
        linear_start: of the memory network, the share of the training without softmaxes.
        noise: of the memory network, in the times of sentences.
    """

    name = "babi"
    sections = ()
    tags = ("task", "task/score")
    unit = "questions"

    def __init__(
        self,
        *,
        number: int | str = 1,
        data: str | Path | None = None,
        model: str = "core",
        encoding: str = "positions",
        sentences: int | None = None,
        word_size: int = 100,
        train_questions: int = 10_000,
        train_seed: int = 1,
        test_questions: int = 1000,
        test_seed: int = 3,
        validation: float = 0.1,
        entities: Sequence[str] = (),
        hops: int = 3,
        linear_start: float = 0.1,
        noise: float = 0.1,
    ):
        for option, value, known in (("model", model, MODELS), ("encoding", encoding, ENCODINGS)):
            if value not in known:
                raise UserError(f"task.{option} is {value!r}; {nearest(str(value), known)}")
        refuse_equal_seeds(train_seed, test_seed)
        refuse_nothing(train_questions=train_questions, test_questions=test_questions, word_size=word_size)
        if sentences is not None:
            refuse_nothing(sentences=sentences)
        offered = babi.NUMBERS if data is not None else babi_world.NUMBERS
        if number != "all" and number not in offered:
            of_all = "" if data is not None else "; for the others give task.data=FOLDER of the official files"
            raise UserError(f"task.number={number}; expected one of {', '.join(map(str, offered))}, or all{of_all}")
        if not 0 < validation < 1:
            raise UserError(f"task.validation={validation}; expected between 0 and 1, such as 0.1")
        self.numbers = list(offered) if number == "all" else [int(number)]
        self.folder = None if data is None else Path(data)
        self.kind, self.encoding, self.sentences, self.word_size = model, encoding, sentences, word_size
        self.sizes = {"train": train_questions, "test": test_questions}
        self.seeds = {"train": train_seed, "test": test_seed}
        self.validation, self.entities = validation, list(entities)
        self.memory: dict[str, Any] = {"hops": hops, "linear_start": linear_start, "noise": noise}
        self._told: dict[tuple[int, str], babi.Told] = {}
        self._asked: dict[str, list[babi.Asked]] = {}

    def collect(self, *, quiet: bool = False) -> None:
        """Read the files, or tell stories."""
        if self._told:
            return
        for number in self.numbers:
            files = {} if self.folder is None else babi.find(self.folder, number)
            for part in ("train", "test"):
                if part in files:
                    self._told[number, part] = babi.read(files[part])
                elif self.folder is None or (part == "train" and number in babi_world.NUMBERS):
                    self._told[number, part] = babi_world.tell(number, self.sizes[part], self.seeds[part])
                    if self.folder is not None and not quiet:
                        print(
                            f"{self.folder} has no training file of task {number}; stories of our own stand in for it"
                        )
                else:
                    raise UserError(
                        f"{self.folder} has no {part} file of task {number}, like qa{number}_..._{part}.txt"
                    )
            train = self._told.pop((number, "train"))
            self._told[number, "train"], self._told[number, "validation"] = babi.split(train, self.validation)

    def about(self) -> dict[str, Any]:
        """The vocabulary of the training data, the longest sentence and question, and the data's checksums."""
        self.collect()
        told = [self._told[number, part] for number in self.numbers for part in ("train", "validation")]
        digest = {part: hashlib.sha256() for part in _PARTS}
        for (_, part), each in sorted(self._told.items()):
            digest[part].update("\n".join(babi.lines(each)).encode())
        return {
            "vocabulary": babi.vocabulary(told),
            "longest": list(babi.longest(told)),
            "data": {part: value.hexdigest()[:16] for part, value in digest.items()},
        }

    def model(self, core: CoreBuilder, about: Mapping[str, Any]) -> nn.Module:
        """A ``QuestionReader``, without other sizes of a core of the paper's twenty slots; or a ``MemoryNetwork``."""
        num_words, sizes = len(about["vocabulary"]) + 1, tuple(about["longest"])
        positions = self.encoding == "positions"
        if self.kind == "memory_network":
            most = max(self._most(number) for number in self.numbers)
            return MemoryNetwork(num_words, self.word_size, most, position_encoding=positions, **self.memory)
        built = core(self.word_size, num_tokens=1, num_slots=20, slot_size=self.word_size)
        require_memory(built, "the babi task")
        tied = bool(getattr(built, "tied", False))
        if tied != bool(self.entities):
            mend = "give task.entities=[...], the words" if tied else "set core=entnet core.keys=tied"
            raise UserError(f"keys are tied to words only where both are said: {mend}")
        known = list(about["vocabulary"])
        for word in self.entities:
            if word not in known:
                raise UserError(f"task.entities: the word {word!r} is not in the training data; {nearest(word, known)}")
        if self.entities and (built.num_slots, built.slot_size) != (len(self.entities), self.word_size):
            raise UserError(
                f"{len(self.entities)} entities of {self.word_size} are the keys; set core.num_slots={len(self.entities)} "
                f"core.slot_size={self.word_size}"
            )
        entities = [known.index(word) + 1 for word in self.entities]
        return QuestionReader(built, num_words, self.word_size, sizes, masked=positions, entities=entities)

    def _most(self, number: int) -> int:
        return self.sentences or (130 if number == 3 else 70)

    def _encoded(self, part: str) -> list[babi.Asked]:
        """The questions of a part, a task each."""
        if part not in self._asked:
            about = self.about()
            self._asked[part] = [
                babi.encode(
                    self._told[number, part],
                    about["vocabulary"],
                    tuple(about["longest"]),
                    self._most(number),
                    f"task {number}'s {part} data",
                )
                for number in self.numbers
            ]
        return self._asked[part]

    def batches(self, batch_size: int, device: torch.device) -> Callable[[torch.Generator], Batch]:
        """Stories drawn with replacement, of all tasks together, with all their questions, about so many.

        The paper draws questions. A story that is read once for all its questions, mostly five, is read in a fifth of the
        time, and no question is drawn more often than another.
        """
        self._encoded("test")  # what is wrong with them is said before the training
        asked = babi.Asked(*(part.to(device) for part in babi.join(self._encoded("train"))))
        first, count = babi.stories(asked)
        size = max(1, round(batch_size * len(first) / len(asked.answers)))

        def draw(generator: torch.Generator) -> Batch:
            which = torch.randint(len(first), (size,), generator=generator, device=device)
            ends = count[which].cumsum(0)
            rows = torch.repeat_interleave(first[which] - ends + count[which], count[which])
            return babi.gather(asked, rows + torch.arange(len(rows), device=device))

        return draw

    def losses(self, model: nn.Module, batch: Batch, generator: torch.Generator) -> dict[str, Tensor]:
        """The cross-entropy of the answers, and their error."""
        scores = model(batch)
        wrong = (scores.argmax(1) != batch.answers).float().mean()
        return {"loss": F.cross_entropy(scores, batch.answers), "error": wrong}

    @torch.no_grad()
    def evaluate(self, model: nn.Module, limit: int | None = None, *, quiet: bool = True) -> dict[str, Any]:
        """The error on each task's test and validation questions."""
        errors: dict[str, dict[str, float]] = {}
        for n, number in enumerate(self.numbers):
            found: dict[str, float] = {}
            for part in ("test", "validation"):
                asked = self._encoded(part)[n]
                wrong = [said != answer for said, answer in self._answers(model, asked, limit)]
                found[part] = sum(wrong) / len(wrong)
                found[f"{part}_questions"] = len(wrong)
            errors[str(number)] = found
        mean = {part: sum(entry[part] for entry in errors.values()) / len(errors) for part in ("test", "validation")}
        scores = {"error": mean["test"], "validation_error": mean["validation"]}
        if len(errors) > 1:
            scores["failed"] = float(sum(entry["test"] > _FAILED for entry in errors.values()))
        return {
            "scores": scores,
            "errors": errors,
            "model": self.kind,
            "encoding": self.encoding,
            "jointly": len(self.numbers) > 1,
            "official": self.folder is not None,
            "train_questions": len(self._encoded("train")[0].answers),
        }

    def _answers(self, model: nn.Module, asked: babi.Asked, limit: int | None) -> Iterator[tuple[int, int]]:
        """What the model says to questions, and what is right."""
        device = next(model.parameters()).device
        held = babi.Asked(*(part.to(device) for part in asked))
        for which in torch.arange(min(limit or len(asked.answers), len(asked.answers)), device=device).split(
            _EVALUATION_BATCH
        ):
            batch = babi.gather(held, which)
            yield from zip(model(batch).argmax(1).tolist(), batch.answers.tolist(), strict=True)

    def objective(self, result: Mapping[str, Any]) -> float:
        """The share of right answers to the validation questions."""
        return 1.0 - float(result["scores"]["validation_error"])

    def table(self, results: Mapping[str, Mapping[str, Any]], of: str) -> Table:
        """The error on each task, of several runs of a model the best on validation; the paper's figures beside it."""
        best: dict[str, dict[int, tuple[float, float]]] = {}
        for result in results.values():
            column = best.setdefault(_column(result), {})
            for number, entry in result["errors"].items():
                found = (entry["validation"], entry["test"])
                column[int(number)] = min(column.get(int(number), found), found)
        columns = {name: {n: 100 * test for n, (_, test) in column.items()} for name, column in best.items()}
        first = next(iter(results.values()))
        for name, errors in published(first["encoding"], first["train_questions"]).items():
            columns[name] = dict(enumerate(errors, 1))
        runs = "" if len(results) == 1 else ", of each model's runs the best on validation"
        ours = "" if first["official"] else "; our own stories, the paper's figures are of the official ones"
        table = Table("task", title=f"{of}: wrong answers, %{runs}{ours}", title_justify="left")
        for name in columns:
            table.add_column(name, justify="right")
        numbers = sorted({number for column in best.values() for number in column})
        for number in numbers:
            cells = (f"{column[number]:.1f}" if number in column else "" for column in columns.values())
            table.add_row(f"{number} {babi.NAMES[number - 1]}", *cells)
        if len(numbers) > 1:
            table.add_section()
            shared = {name: [column[n] for n in numbers if n in column] for name, column in columns.items()}
            means = (
                f"{sum(errors) / len(errors):.1f}" if len(errors) == len(numbers) else "" for errors in shared.values()
            )
            table.add_row("mean", *means)
            failed = (
                str(sum(error > 100 * _FAILED for error in errors)) if len(errors) == len(numbers) else ""
                for errors in shared.values()
            )
            table.add_row("failed (> 5 %)", *failed)
        return table

    @torch.no_grad()
    def draw(
        self,
        model: nn.Module,
        result: Mapping[str, Any],
        metrics: Sequence[Mapping[str, Any]],
        folder: Path,
        example: int,
    ) -> list[Path]:
        """A test story with what the model attended to: the gates of a core over time, or the hops of a memory network."""
        asked = self._encoded("test")[0]
        if example >= len(asked.answers):
            raise UserError(f"example {example} was asked for; there are {len(asked.answers)} test questions")
        device = next(model.parameters()).device
        held = babi.Asked(*(part.to(device) for part in asked))
        batch = babi.gather(held, torch.tensor([example], device=device))
        known = ["", *self.about()["vocabulary"]]

        def text(row: Tensor) -> str:
            return " ".join(known[word] for word in row.tolist() if word)

        right = self._told[self.numbers[0], "test"].questions[example].answer
        said = known[int(model(batch).argmax())]
        story, asks = [text(row) for row in batch.sentences[0]], f"{text(batch.questions[0])}?"
        title = f"{asks} the model: {said}; right: {right}"
        written = figures.curves(metrics, folder / "curves.png", of="questions")
        if isinstance(model, MemoryNetwork):
            shown = model.look(batch)[0].t().cpu()
            columns = [f"hop {k + 1}" for k in range(shown.shape[1])]
            return [*written, _draw_story(story, shown, columns, title, "attention", folder / "story.png")]
        assert isinstance(model, QuestionReader)
        tokens, _ = model.tokens(batch)
        written.append(_draw_nearest(model, batch, self.entities, known, folder / "nearest.png"))
        gates = trace(model.core, tokens, model.initial_state(1)).get("gate")
        if gates is not None:
            columns = self.entities or [str(k + 1) for k in range(gates.shape[2])]
            written.append(_draw_story(story, gates[:, 0].cpu(), columns, title, "gate open", folder / "story.png"))
        return written if self.entities else written + draw_choices(model.core, tokens, folder)


def _column(result: Mapping[str, Any]) -> str:
    """What the runs of a column have in common."""
    name = "MemN2N" if result["model"] == "memory_network" else str(result["core"])
    return name + (", bag of words" if result["encoding"] == "bag" else "") + (", jointly" if result["jointly"] else "")


def _draw_nearest(
    model: QuestionReader, batch: babi.Batch, entities: Sequence[str], known: Sequence[str], path: Path
) -> Path:
    """The two words nearest to each memory after a story, with their cosine similarities (the paper's Table 3)."""
    similarities, words = (part[0].cpu() for part in model.nearest(batch))
    K = len(words)
    names = entities or [str(k + 1) for k in range(K)]
    cells = [[f"{known[int(words[k, n])]}  {float(similarities[k, n]):.3f}" for n in range(2)] for k in range(K)]
    figure = figures.blank(6.0, 0.28 * K + 0.8, layout="constrained")
    axis = figure.subplots()
    axis.set_axis_off()
    axis.set_title("the words nearest to each memory after the story, and their cosine similarity", fontsize=9)
    table = axis.table(cells, rowLabels=list(names), colLabels=["nearest", "second"], loc="center", cellLoc="left")
    table.set_fontsize(9)
    return figures.save(figure, path)


def _draw_story(
    story: Sequence[str], shown: Tensor, columns: Sequence[str], title: str, scale: str, path: Path
) -> Path:
    """Sentences, and beside each a row of cells from pale (0) to dark (1); of a long story the last thirty.

    Args:
        story: its sentences.
        shown: ``(sentences, columns)``.
        columns: what stands above the cells.
        title: above it all.
        scale: what the colour is.
        path: the file to write.
    """
    story, shown = story[-30:], shown[-30:]
    figure = figures.blank(4.0 + 0.28 * len(columns), 1.2 + 0.24 * len(story), layout="constrained")
    axis = figure.subplots()
    shades = axis.imshow(shown.numpy(), cmap="Blues", vmin=0, vmax=1, aspect="auto")
    axis.set_yticks(range(len(story)), story, fontsize=8)
    axis.set_xticks(range(len(columns)), columns, fontsize=7)
    axis.set_xlabel("memory" if scale != "attention" else "")
    axis.set_title(title, fontsize=9, loc="right")
    figure.colorbar(shades, ax=axis, label=scale)
    return figures.save(figure, path)
