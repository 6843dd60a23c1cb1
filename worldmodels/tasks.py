"""The sequence tasks: their data, the network around a core, and how well it does.

Three tasks in which the papers show what their cores learn: adding numbers (SCOFF), arithmetic on coordinates (NPS) and
a grid world told as text (EntNet). S2RM's, on views of an environment, is in ``view_tasks``. This is the one table of
all names.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from rich.table import Table
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from .core import RecurrentCore, State, Tokens, unroll
from .cores.entnet import EntNet, OutputModule
from .data import tasks as data
from .errors import UserError
from .report import tasks as pictures
from .report.choices import choice_map, trace

TASKS: dict[str, dict[str, Any]] = {
    "adding": {"_target_": "worldmodels.tasks.Adding"},
    "arithmetic": {"_target_": "worldmodels.tasks.CoordinateArithmetic"},
    "gridworld": {"_target_": "worldmodels.tasks.GridWorld"},
    "views": {"_target_": "worldmodels.view_tasks.PartialViews"},
}

Batch = tuple[Tensor, ...]
_EVALUATION_BATCH = 1000
_SHOWN = 50  # steps of a long sequence that a choice map shows


@runtime_checkable
class Task(Protocol):
    """What a task is; all options are keyword arguments of its constructor.

    ``token_size`` and ``num_tokens`` are the core's; so are ``num_slots`` and ``slot_size`` where ``core.num_slots`` and
    ``core.slot_size`` do not say otherwise. A task whose tokens have positions says of how many numbers in ``position_size``.
    """

    name: str
    token_size: int
    num_tokens: int
    num_slots: int
    slot_size: int

    def model(self, core: RecurrentCore) -> nn.Module:
        """The network around a core; refuses a core that cannot do the task by a ``UserError``."""
        ...

    def batches(self, batch_size: int, device: torch.device) -> Callable[[torch.Generator], Batch]:
        """Makes the training data; what it returns draws a batch of them."""
        ...

    def losses(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """The loss of a batch, and what else is worth a curve."""
        ...

    def evaluate(self, model: Any, limit: int | None = None) -> dict[str, Any]:
        """Scores on the test data, or on the first ``limit`` of them: JSON, with "scores" a flat dict of numbers."""
        ...

    def table(self, results: Mapping[str, Mapping[str, Any]], title: str) -> Table:
        """One table of several models' results, by name."""
        ...

    def draw(self, model: Any, result: Mapping[str, Any], folder: Path, example: int) -> list[Path]:
        """Pictures of a result, and of one test example where there is something to see."""
        ...


def _data_generator(seed: int, part: int) -> torch.Generator:
    """The source of a fixed data set: on the CPU, so that the set is the same on every device."""
    return torch.Generator().manual_seed(seed * 1_000_003 + part)


def _refuse_equal_seeds(train_seed: int, test_seed: int) -> None:
    if train_seed == test_seed:
        raise UserError(f"task.train_seed and task.test_seed are both {test_seed}; test data must be others")


def _refuse_nothing(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise UserError(f"task.{name}={size}; expected at least 1")


def _drawn(parts: Batch, batch_size: int, device: torch.device) -> Callable[[torch.Generator], Batch]:
    """Batches of a fixed data set, drawn with replacement (see ``training.draw_paths`` for why), gathered on the device."""
    held = tuple(part.to(device) for part in parts)

    def draw(generator: torch.Generator) -> Batch:
        index = torch.randint(len(held[0]), (batch_size,), generator=generator, device=device)
        return tuple(part[index] for part in held)

    return draw


def _choices(core: RecurrentCore, tokens: Tokens, folder: Path) -> list[Path]:
    """The choice map of a core over one sequence of tokens ``(T, 1, ...)``; none if it chooses nothing."""
    chosen = trace(core, tokens, core.initial_state(1))
    drawn = choice_map({name: part[:, 0] for name, part in chosen.items()}, core.num_slots, folder / "choices.png")
    return [drawn] if drawn else []


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


class SequenceSum(nn.Module):
    """A core that reads numbers one by one; a linear readout of all slots together after the last.

    Args:
        core: a core with a state.
        token_size: what number and mark are embedded to.
    """

    def __init__(self, core: RecurrentCore, token_size: int):
        super().__init__()
        self.core: RecurrentCore
        self.number = nn.Linear(1, token_size, bias=False)
        self.mark = nn.Embedding(2, token_size)
        self.core = core
        self.readout = nn.Linear(core.num_slots * core.slot_size, 1)

    def forward(self, sequences: Tensor) -> Tensor:
        """The sums ``(B,)`` the core makes of ``sequences (B, T, 2)``."""
        slots, _ = self.unroll(sequences)
        return self.sums(slots[-1])

    def tokens(self, sequences: Tensor) -> Tokens:
        """Numbers and marks as a core reads them, ``(T, B, 1, F)``."""
        numbers, marks = sequences.transpose(0, 1).split(1, dim=-1)
        return Tokens((self.number(numbers) + self.mark(marks[..., 0].long()))[:, :, None])

    def unroll(self, sequences: Tensor) -> tuple[Tensor, State]:
        """The slots after every number, ``(T, B, K, D)``."""
        return unroll(self.core, self.tokens(sequences), self.core.initial_state(len(sequences)))

    def sums(self, slots: Tensor) -> Tensor:
        """The readout, ``(..., K, D)`` to ``(...)``."""
        return self.readout(slots.flatten(-2))[..., 0]


class Adding:
    """Add the marked numbers of a long sequence, more of them and over a longer time than ever trained.

    Goyal et al. 2020, "Object Files and Schemata" (SCOFF), appendix B, Tables 2 and 3. Numbers are U[0, 1]; see
    ``data.tasks.adding`` for where the marked ones lie. Training: a fixed set, an equal share for each of
    ``train_counts``. Test: a fixed set for each of ``test_counts``. The error is the mean squared one.

    The paper does not say how numbers enter and sums leave. Here a step is one token, the number times a learned vector plus
    one of two learned vectors for marked or not; the sum is a linear readout of all slots.

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
    num_tokens = 1
    num_slots = 5
    slot_size = 60

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
        _refuse_equal_seeds(train_seed, test_seed)
        _refuse_nothing(train_size=train_size, test_size=test_size, token_size=token_size)
        for counts, length in ((train_counts, train_length), (test_counts, test_length)):
            if not counts or min(counts) < 1 or max(counts) > length:
                raise UserError(f"{list(counts)} numbers of {length} cannot be added; give counts from 1 to the length")
        self.train_counts, self.test_counts = list(train_counts), list(test_counts)
        self.train_length, self.test_length = train_length, test_length
        self.train_size, self.test_size = train_size, test_size
        self.train_seed, self.test_seed = train_seed, test_seed
        self.token_size = token_size

    def model(self, core: RecurrentCore) -> SequenceSum:
        """A ``SequenceSum``."""
        if not core.initial_state(1):
            raise UserError(f"the adding task needs a core with a state; {type(core).__name__} has none")
        return SequenceSum(core, self.token_size)

    def batches(self, batch_size: int, device: torch.device) -> Callable[[torch.Generator], Batch]:
        """Sequences ``(B, T, 2)`` and their sums."""
        share = -(-self.train_size // len(self.train_counts))
        sets = [
            data.adding(share, self.train_length, count, _data_generator(self.train_seed, count))
            for count in self.train_counts
        ]
        return _drawn(tuple(torch.cat(parts) for parts in zip(*sets, strict=True)), batch_size, device)

    def losses(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """The mean squared error."""
        sequences, target = batch
        return {"loss": F.mse_loss(model(sequences), target)}

    @torch.no_grad()
    def evaluate(self, model: SequenceSum, limit: int | None = None) -> dict[str, Any]:
        """The error for each count, beside that of always saying the mean sum in training, and the mean sum of that count."""
        training_mean = sum(self.train_counts) / len(self.train_counts) / 2
        size = min(limit or self.test_size, self.test_size)
        errors = {}
        for count in self.test_counts:
            sequences, target = data.adding(size, self.test_length, count, _data_generator(self.test_seed, count))
            pred = torch.cat([model(part.to(_device(model))).cpu() for part in sequences.split(_EVALUATION_BATCH)])
            errors[str(count)] = {
                "mse": float(F.mse_loss(pred, target)),
                "training_mean": float((target - training_mean).square().mean()),
                "own_mean": float((target - count / 2).square().mean()),
            }
        scores = {f"mse/{count}": entry["mse"] for count, entry in errors.items()}
        return {"scores": scores, "errors": errors, "length": self.test_length, "n": size}

    def table(self, results: Mapping[str, Mapping[str, Any]], title: str) -> Table:
        """Errors by count, the constant answers below."""
        table = Table("mean squared error", title=title, title_justify="left")
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
    def draw(self, model: SequenceSum, result: Mapping[str, Any], folder: Path, example: int) -> list[Path]:
        """Error against count, and what the readout says on the way through one test sequence."""
        lines = {
            "the model": [entry["mse"] for entry in result["errors"].values()],
            "mean sum of training": [entry["training_mean"] for entry in result["errors"].values()],
            "mean sum of that count": [entry["own_mean"] for entry in result["errors"].values()],
        }
        counts = [int(count) for count in result["errors"]]
        written = [
            pictures.against(
                counts,
                lines,
                "numbers to add",
                f"mean squared error at length {result['length']}",
                folder / "errors.png",
            )
        ]
        count = self.test_counts[-1]
        sequences, _ = data.adding(example + 1, self.test_length, count, _data_generator(self.test_seed, count))
        sequence = sequences[example:]
        slots, _ = model.unroll(sequence.to(_device(model)))
        numbers, marks = sequence[0].unbind(-1)
        said = model.sums(slots)[:, 0].cpu()
        written.append(pictures.running_sum((numbers * marks).cumsum(0), said, marks > 0, folder / "running_sum.png"))
        shown = model.tokens(sequence[:, :_SHOWN].to(_device(model)))
        return written + _choices(model.core, shown, folder)


class SlotChange(nn.Module):
    """Coordinates changed by a core: the input of each slot plus the core's change.

    Args:
        core: a core without state, whose tokens are (input, output) and whose slots are the inputs.
    """

    def __init__(self, core: RecurrentCore):
        super().__init__()
        self.core: RecurrentCore
        self.core = core

    def forward(self, tokens: Tensor) -> Tensor:
        """Predicted outputs ``(B, 2, 2)`` for ``tokens (B, 2, 4)``."""
        change, _ = self.core(self.core.prepare(Tokens(tokens)), self.core.initial_state(len(tokens)))
        return tokens[..., : self.core.slot_size] + change


class CoordinateArithmetic:
    """Find four operations in examples of their input and output, one rule for each.

    Goyal et al. 2021, "Neural Production Systems", section 4.1 and appendix D; see ``data.tasks.coordinate_arithmetic``.
    A token is a coordinate before and after. The choice of slot, context and rule sees both; the rule's MLP sees the
    coordinates before alone, so it cannot copy the output. Fixed training and test sets; the error is the mean squared one
    over both slots and both coordinates.

    A rule is counted for an operation where the core chose it (of a core that changes every slot: for the coordinate that
    the operation changed). ``purity``: the share of examples that use their operation's most used rule. ``matched``: the same
    where every operation must have a rule of its own, the best assignment of rules to operations.

    Args:
        train_size: training examples.
        train_seed: of the training set.
        test_size: test examples.
        test_seed: of the test set.
    """

    name = "arithmetic"
    token_size = 4
    num_tokens = 2
    num_slots = 2
    slot_size = 2

    def __init__(self, *, train_size: int = 10_000, train_seed: int = 1, test_size: int = 2000, test_seed: int = 3):
        _refuse_equal_seeds(train_seed, test_seed)
        _refuse_nothing(train_size=train_size, test_size=test_size)
        self.train_size, self.train_seed = train_size, train_seed
        self.test_size, self.test_seed = test_size, test_seed

    def model(self, core: RecurrentCore) -> SlotChange:
        """A ``SlotChange``."""
        example = Tokens(torch.zeros(1, self.num_slots, self.token_size))
        state = core.initial_state(1)
        if state or "rule" not in core.explain(core.prepare(example), state) or core.slot_size != self.slot_size:
            raise UserError(
                f"the arithmetic task needs a core that applies rules to slots of {self.slot_size}, like core=snps or "
                f"core=routing; got {type(core).__name__} with slots of {core.slot_size}"
            )
        return SlotChange(core)

    def batches(self, batch_size: int, device: torch.device) -> Callable[[torch.Generator], Batch]:
        """Tokens ``(B, 2, 4)``."""
        tokens, _, _ = data.coordinate_arithmetic(self.train_size, _data_generator(self.train_seed, 0))
        return _drawn((tokens,), batch_size, device)

    def losses(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """The mean squared error."""
        (tokens,) = batch
        return {"loss": F.mse_loss(model(tokens), tokens[..., self.slot_size :])}

    @torch.no_grad()
    def evaluate(self, model: SlotChange, limit: int | None = None) -> dict[str, Any]:
        """The error beside that of copying the input and of the mean, and which rule was used for which operation."""
        tokens, operation, primary = data.coordinate_arithmetic(self.test_size, _data_generator(self.test_seed, 0))
        tokens, operation, primary = tokens[:limit], operation[:limit], primary[:limit]
        before, after = tokens.split(self.slot_size, dim=-1)
        pred = model(tokens.to(_device(model))).cpu()
        chosen = {name: part.cpu() for name, part in model.core.explain(Tokens(tokens.to(_device(model))), {}).items()}
        rule = chosen["rule"][:, 0]
        if rule.dim() == 2:  # a rule for each slot
            rule = rule[torch.arange(len(rule)), primary]
        right_slot = chosen["primary"][:, 0] == primary if "primary" in chosen else rule >= 0
        count = max(int(rule.max()) + 1, getattr(model.core, "num_rules", 0))
        uses = torch.zeros(len(data.OPERATIONS), count + 1, dtype=torch.long)
        uses.index_put_((operation, torch.where(rule < 0, count, rule)), torch.ones_like(rule), accumulate=True)
        rules, null = uses[:, :count], uses[:, count]
        rows, columns = linear_sum_assignment(-rules.numpy())
        scores = {
            "mse": float(F.mse_loss(pred, after)),
            "purity": float(rules.amax(1).sum() / len(rule)),
            "matched": float(rules[rows, columns].sum() / len(rule)),
            "right_slot": float(right_slot.double().mean()),
        }
        return {
            "scores": scores,
            "copy_mse": float(F.mse_loss(before, after)),
            "mean_mse": float((after - after.mean(0)).square().mean()),
            "uses": rules.tolist(),
            "null": null.tolist(),
            "n": len(rule),
        }

    def table(self, results: Mapping[str, Mapping[str, Any]], title: str) -> Table:
        """Errors and shares, then how often each rule was used for each operation."""
        table = Table("", title=title, title_justify="left")
        most = max(len(result["uses"][0]) for result in results.values())
        for r in range(most):
            table.add_column(f"rule {r + 1}", justify="right")
        for name in ("MSE", "of copying", "of the mean", "purity", "matched"):
            table.add_column(name, justify="right")
        for name, result in results.items():
            scores = result["scores"]
            shares = [f"{100 * scores[key]:.1f} %" for key in ("purity", "matched")]
            errors = [f"{error:.5f}" for error in (scores["mse"], result["copy_mse"], result["mean_mse"])]
            table.add_row(name, *[""] * most, *errors, *shares)
            for operation, uses in zip(data.OPERATIONS, result["uses"], strict=True):
                table.add_row(f"  {operation}", *(str(n) for n in uses))
            table.add_section()
        return table

    def draw(self, model: SlotChange, result: Mapping[str, Any], folder: Path, example: int) -> list[Path]:
        """The table of operations and rules as a picture."""
        return [pictures.rule_table(data.OPERATIONS, result["uses"], folder / "rules.png")]


class StoryReader(nn.Module):
    """A core that reads a story statement by statement, asked questions in words.

    Words are looked up in one table of embeddings, in which the null symbol's is zero. A statement is a step of as many
    tokens as it may have words, absent ones masked: EntNet sums them by its own masks (its eq. 1), the lstm and gru cores
    read them side by side. Or every word is a step of its own. The question is summed with learned masks of its own, as the
    EntNet authors do, and answered from the slots by EntNet's eq. 6; a linear layer makes it as long as a slot where that
    differs.

    Args:
        core: a core with a state.
        word_size: of an embedding.
        reads: a step is one of the "statements", or one of the "words".
    """

    def __init__(self, core: RecurrentCore, word_size: int, reads: str):
        super().__init__()
        self.stride = data.STATEMENT_WORDS if reads == "words" else 1
        self.core: RecurrentCore
        self.questions: Tensor
        size = core.slot_size
        self.words = nn.Embedding(len(data.VOCABULARY), word_size, padding_idx=data.NULL)
        nn.init.normal_(self.words.weight[1:], std=0.1)
        self.core = core
        self.question_masks = nn.Parameter(torch.ones(data.QUESTIONS.shape[1], word_size))
        self.query = nn.Linear(word_size, size, bias=False) if size != word_size else nn.Identity()
        self.answer = OutputModule(size, len(data.VOCABULARY))
        self.register_buffer("questions", data.QUESTIONS.clone(), persistent=False)

    def tokens(self, words: Tensor) -> Tokens:
        """Words ``(T, B, 4)`` as a core reads them: their embeddings, the null symbol absent."""
        if self.stride > 1:
            words = words.transpose(1, 2).flatten(0, 1)[..., None]  # (4 T, B, 1)
        return Tokens(self.words(words), mask=words != data.NULL)

    def forward(self, words: Tensor, first: int) -> Tensor:
        """Where both agents are after each statement from the ``first`` on: scores of all words ``(T - first, B, 2, V)``."""
        slots, _ = unroll(self.core, self.tokens(words), self.core.initial_state(words.shape[1]))
        memory = slots[self.stride - 1 :: self.stride][first:]
        T, B, K, D = memory.shape
        query = self.query((self.question_masks * self.words(self.questions)).sum(1))  # (2, D)
        memory = memory[:, :, None].expand(T, B, len(query), K, D).flatten(0, 2)
        scores: Tensor = self.answer(query.expand(T, B, *query.shape).flatten(0, 2), memory)
        return scores.unflatten(0, (T, B, len(query)))


class GridWorld:
    """Read what two agents on a grid do and say where they are: EntNet's world model task.

    Henaff et al. 2017, "Tracking the World State with Recurrent Entity Networks", section 5.1, Table 1, appendix B; see
    ``data.tasks.stories`` for the text. The answer is one of all words. The error is the share of wrong answers, over
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
    """

    name = "gridworld"
    num_slots = 5
    slot_size = 20

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
    ):
        if reads not in ("statements", "words"):
            raise UserError(f"task.reads is {reads!r}; expected statements or words")
        _refuse_nothing(test_size=test_size, word_size=word_size)
        lengths = [length] if not variable_length else sorted({length, *range(20, 81, 10)})
        self.test_lengths = list(test_lengths) if test_lengths is not None else lengths
        if min(length, *self.test_lengths) < data.SHORTEST_STORY:
            raise UserError(
                f"a story places two agents in its first {data.SHORTEST_STORY} statements; give longer ones"
            )
        self.reads = reads
        self.num_tokens = data.STATEMENT_WORDS if reads == "statements" else 1
        self.length = length
        self.variable_length = variable_length
        self.test_size, self.test_seed = test_size, test_seed
        self.token_size = word_size

    def model(self, core: RecurrentCore) -> StoryReader:
        """A ``StoryReader``."""
        if not core.initial_state(1):
            raise UserError(f"the gridworld task needs a core with a state; {type(core).__name__} has none")
        if isinstance(core, EntNet) and core.tied:
            raise UserError("the gridworld task gives a core no keys; leave out core.keys=tied")
        return StoryReader(core, self.token_size, self.reads)

    def batches(self, batch_size: int, device: torch.device) -> Callable[[torch.Generator], Batch]:
        """Fresh stories ``(T, B, 4)`` and where the agents are ``(T, B, 2)``."""
        return lambda generator: data.stories(batch_size, self.length, generator)

    def losses(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """The cross-entropy of the answers, and their error."""
        words, where = batch
        first = data.SHORTEST_STORY - 1 if self.variable_length else self.length - 1
        scores = model(words, first)
        where = where[first:]
        error = (scores.argmax(-1) != where).float().mean()
        return {"loss": F.cross_entropy(scores.flatten(0, 2), where.flatten()), "error": error}

    @torch.no_grad()
    def evaluate(self, model: StoryReader, limit: int | None = None) -> dict[str, Any]:
        """The error for each length, beside that of saying where the agents were placed."""
        size = min(limit or self.test_size, self.test_size)
        errors = {}
        for length in self.test_lengths:
            words, where = data.stories(size, length, _data_generator(self.test_seed, length))
            parts = words.to(_device(model)).split(_EVALUATION_BATCH, dim=1)
            answers = torch.cat([model(part, length - 1)[0].argmax(-1) for part in parts]).cpu()
            errors[str(length)] = {
                "error": float((answers != where[-1]).double().mean()),
                "as_placed": float((where[0] != where[-1]).double().mean()),
            }
        scores = {f"error/{length}": entry["error"] for length, entry in errors.items()}
        return {"scores": scores, "errors": errors, "n": size}

    def table(self, results: Mapping[str, Mapping[str, Any]], title: str) -> Table:
        """Errors by length of the story; an empty cell is a length that was not asked."""
        table = Table("share of wrong answers", title=title, title_justify="left")
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
    def draw(self, model: StoryReader, result: Mapping[str, Any], folder: Path, example: int) -> list[Path]:
        """The error against the length, if there are several, and one test story on its grid with the answers."""
        written = []
        if len(self.test_lengths) > 1:
            lines = {
                "the model": [entry["error"] for entry in result["errors"].values()],
                "as placed": [entry["as_placed"] for entry in result["errors"].values()],
            }
            path = folder / "errors.png"
            written.append(
                pictures.against(self.test_lengths, lines, "statements", "share of wrong answers", path, log=False)
            )
        length = self.test_lengths[0]
        words, where = data.stories(example + 1, length, _data_generator(self.test_seed, length))
        words, where = words[:, example:], where[:, example:]
        answers = model(words.to(_device(model)), data.SHORTEST_STORY - 1).argmax(-1)[:, 0].cpu()
        written.append(
            pictures.story(data.tell(words[:, 0]), _cells(where[:, 0]), _cells(answers), folder / "story.png")
        )
        return written + _choices(model.core, model.tokens(words.to(_device(model))), folder)


def _cells(words: Tensor) -> Tensor:
    """Words as coordinates ``(..., 2)`` from 1 to 10; what is no location becomes (0, 0)."""
    index = words - data.LOCATIONS
    cells = torch.stack([index // data.GRID, index % data.GRID], dim=-1) + 1
    return torch.where(index[..., None] >= 0, cells, 0)
