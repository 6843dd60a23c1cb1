"""The tasks, one experiment family a file; this is what a task is, and the one table of their names.

An installed package adds tasks under the entry point ``worldmodels.tasks``.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol, overload, runtime_checkable

import torch
from rich.console import RenderableType
from torch import Tensor, nn

from ..core import RecurrentCore, SequenceReader
from ..errors import UserError

TASKS: dict[str, dict[str, Any]] = {
    "transitions": {"_target_": "worldmodels.tasks.transitions.Transitions"},
    "views": {"_target_": "worldmodels.tasks.views.PartialViews"},
    "adding": {"_target_": "worldmodels.tasks.adding.Adding"},
    "arithmetic": {"_target_": "worldmodels.tasks.arithmetic.CoordinateArithmetic"},
    "digits": {"_target_": "worldmodels.tasks.digits.DigitTransformations"},
    "gridworld": {"_target_": "worldmodels.tasks.gridworld.GridWorld"},
    "relations": {"_target_": "worldmodels.tasks.relations.Relations"},
    "babi": {"_target_": "worldmodels.tasks.babi.Babi"},
    "cbt": {"_target_": "worldmodels.tasks.cbt.ChildrensBookTest"},
    "video": {"_target_": "worldmodels.tasks.video.Video"},
    "occluders": {"_target_": "worldmodels.tasks.occluders.Occluders"},
    "stacks": {"_target_": "worldmodels.tasks.stacks.Stacks"},
}

Batch = Any
"""What a task's loss reads, as the task itself draws it."""


@runtime_checkable
class CoreBuilder(Protocol):
    """Makes the core that was asked for, in the sizes that a task needs; ``core.num_slots`` and the like go first.

    A core is for N tokens of F, with K slots of D; ``position_size`` is P where tokens have positions. Where a task says how
    many steps its sequences have, it may be a reader of whole sequences.
    """

    @overload
    def __call__(
        self, token_size: int, num_tokens: int, num_slots: int, slot_size: int, position_size: int | None = None
    ) -> RecurrentCore: ...

    @overload
    def __call__(
        self, token_size: int, num_tokens: int, num_slots: int, slot_size: int, *, length: int
    ) -> RecurrentCore | SequenceReader: ...


@runtime_checkable
class Task(Protocol):
    """What a task is: something to train on, from data to pictures. All options are keyword arguments of its constructor.

    What only some tasks can do is a method that those have besides, which ``Run`` hands on: ``rollout(model, ...)`` imagines
    from an observation, ``on(episodes)`` is the same task tested on other data. ``overview(results, of)`` is the table that
    ``worldmodels report`` makes of many runs, where it is another than ``table``.

    Attributes:
        name: for people.
        sections: parts of the config, like "env" or "trainer", that its constructor takes as arguments of these names.
        tags: what the names of its losses and of its scores begin with in the logs.
        unit: what ``trainer.batch_size`` counts.
    """

    name: str
    sections: ClassVar[tuple[str, ...]]
    tags: ClassVar[tuple[str, str]]
    unit: ClassVar[str]

    def collect(self, *, quiet: bool = False) -> None:
        """Make sure that the data are there: found, recorded or nothing to do."""
        ...

    def about(self) -> dict[str, Any]:
        """What a model's shape depends on besides the options, in JSON; a run keeps it, so that it opens without data.

        Where it has an entry "data", the checksums of data sets by name, a run goes on with these only.
        """
        ...

    def model(self, core: CoreBuilder, about: Mapping[str, Any]) -> nn.Module:
        """The network around a core; refuses a core that cannot do the task by a ``UserError``."""
        ...

    def batches(self, batch_size: int, device: torch.device) -> Callable[[torch.Generator], Batch]:
        """The training data; what it returns draws a batch of them. Refuses settings that cannot work."""
        ...

    def losses(self, model: nn.Module, batch: Batch, generator: torch.Generator) -> dict[str, Tensor]:
        """The "loss" of a batch, and what else is worth a curve; ``generator`` is the source of further draws."""
        ...

    def evaluate(self, model: Any, limit: int | None = None, *, quiet: bool = True) -> dict[str, Any]:
        """Scores on the test data, or on the first ``limit`` of them: JSON, with "scores" a flat dict of numbers."""
        ...

    def objective(self, result: Mapping[str, Any]) -> float:
        """The one number of a result that a sweep looks for; the larger the better."""
        ...

    def table(self, results: Mapping[str, Mapping[str, Any]], of: str) -> RenderableType:
        """One table of several models' results, by name; ``of`` says what they are of."""
        ...

    def draw(
        self,
        model: Any,
        result: Mapping[str, Any],
        metrics: Sequence[Mapping[str, Any]],
        folder: Path,
        example: int,
    ) -> list[Path]:
        """Pictures of a result, of the ``metrics`` on the way to it, and of one test example where there is one to see."""
        ...


def refuse_equal_seeds(train_seed: int, test_seed: int) -> None:
    """Refuse test data that are the training data.

    Raises:
        UserError: equal seeds.
    """
    if train_seed == test_seed:
        raise UserError(f"task.train_seed and task.test_seed are both {test_seed}; test data must be others")


def refuse_nothing(**sizes: int) -> None:
    """Refuse sizes below 1.

    Raises:
        UserError: naming the first.
    """
    for name, size in sizes.items():
        if size < 1:
            raise UserError(f"task.{name}={size}; expected at least 1")


def require_memory(core: RecurrentCore | SequenceReader, what: str) -> None:
    """Refuse a core without a state; a reader needs none.

    Raises:
        UserError: naming what needs one.
    """
    if isinstance(core, RecurrentCore) and not core.capabilities.memory:
        raise UserError(f"{what} needs a core with a state; {type(core).__name__} has none")
