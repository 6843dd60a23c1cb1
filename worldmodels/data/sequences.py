"""The data of the sequence tasks: pure functions from a generator to tensors, a batch of sequences at a time."""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

# The grid world's words. A location is its own word, and so are a turn and a move, as in the paper's appendix B.
GRID = 10
NULL = 0
_AGENT, _IS, _AT, _WHERE, _ASK = 1, 3, 4, 5, 6
_FACES, _MOVES, LOCATIONS = 7, 11, 16
DIRECTIONS = ("N", "E", "S", "W")
STRIDES = ((0, 1), (1, 0), (0, -1), (-1, 0))
MAX_MOVE = 5
VOCABULARY = (
    "",
    *("agent1", "agent2", "is", "at", "where", "?"),
    *(f"faces-{d}" for d in DIRECTIONS),
    *(f"moves-{n}" for n in range(1, MAX_MOVE + 1)),
    *(f"({x}, {y})" for x in range(1, GRID + 1) for y in range(1, GRID + 1)),
)
STATEMENT_WORDS = 4
QUESTIONS = torch.tensor([[_WHERE, _IS, _AGENT + agent, _ASK] for agent in range(2)])
SHORTEST_STORY = 4


def generator(seed: int, part: int) -> torch.Generator:
    """The source of a fixed data set: on the CPU, so that the set is the same on every device."""
    return torch.Generator().manual_seed(seed * 1_000_003 + part)


def drawn(
    parts: tuple[Tensor, ...], batch_size: int, device: torch.device
) -> Callable[[torch.Generator], tuple[Tensor, ...]]:
    """Batches of a fixed data set, drawn with replacement (see ``draw_paths`` for why), gathered on the device."""
    held = tuple(part.to(device) for part in parts)

    def draw(generator: torch.Generator) -> tuple[Tensor, ...]:
        index = torch.randint(len(held[0]), (batch_size,), generator=generator, device=device)
        return tuple(part[index] for part in held)

    return draw


def adding(
    size: int, length: int, count: int, generator: torch.Generator
) -> tuple[Float[Tensor, "B T 2"], Float[Tensor, " B"]]:
    """Sequences of numbers of which ``count`` are marked, and the sum of the marked ones.

    The sequence is cut into ``count`` equal parts and one number is marked in each, anywhere in it: with two, one in each
    half, as the SCOFF paper has it (appendix B; it does not say how more numbers are placed).

    Args:
        size: B, how many sequences.
        length: T.
        count: numbers to add, at most ``length``.
        generator: source of the draws, on the device of the result.

    Returns:
        Numbers from U[0, 1] with their marks ``(B, T, 2)``, and the targets.
    """
    device = generator.device
    numbers = torch.rand(size, length, generator=generator, device=device)
    edges = torch.arange(count + 1, device=device) * length // count
    room = edges.diff()
    where = edges[:-1] + (torch.rand(size, count, generator=generator, device=device) * room).long().clamp(max=room - 1)
    marks = torch.zeros(size, length, device=device).scatter_(1, where, 1.0)
    return torch.stack([numbers, marks], dim=-1), (numbers * marks).sum(1)


OPERATIONS = ("x addition", "x subtraction", "y addition", "y subtraction")


def coordinate_arithmetic(
    size: int, generator: torch.Generator
) -> tuple[Float[Tensor, "B 2 4"], Int[Tensor, " B"], Int[Tensor, " B"]]:
    """Pairs of coordinates, and the pairs after one operation on one of them.

    A primary coordinate ``(X_0, Y_0)`` and an operation are drawn; with the other coordinate ``(X_1, Y_1)`` it becomes
    ``(X_0 + X_1, Y_0)``, ``(X_0 - X_1, Y_0)``, ``(X_0, Y_0 + Y_1)`` or ``(X_0, Y_0 - Y_1)`` (NPS section 4.1).

    The paper does not give the range of the coordinates; we draw U[0, 1], where the sign of a change tells an addition
    from a subtraction. Its contextual coordinate is "another coordinate", "selected randomly from the input": of two there
    is one other.

    Args:
        size: B, how many examples.
        generator: source of the draws, on the device of the result.

    Returns:
        Each coordinate before and after, ``(x, y, x^, y^)``; the operation's index in ``OPERATIONS``; the primary's index.
    """
    device = generator.device
    before = torch.rand(size, 2, 2, generator=generator, device=device)
    operation = torch.randint(4, (size,), generator=generator, device=device)
    primary = torch.randint(2, (size,), generator=generator, device=device)
    row = torch.arange(size, device=device)
    axis, sign = operation // 2, 1 - 2 * (operation % 2)
    after = before.clone()
    after[row, primary, axis] += sign * before[row, 1 - primary, axis]
    return torch.cat([before, after], dim=-1), operation, primary


def stories(size: int, length: int, generator: torch.Generator) -> tuple[Int[Tensor, "T B 4"], Int[Tensor, "T B 2"]]:
    """The grid world of the EntNet paper's appendix B as text: T statements, and where both agents are after each.

    Two agents are placed on a 10 x 10 grid, each at once facing a direction: the first four statements, "agent1 is at
    (2, 8)", "agent1 faces-N" and the same of agent2. Then an agent drawn at random turns or moves ahead, with equal
    probability; a direction is one of four, a move 1 to 5 steps; what would leave the grid is drawn again. North is up,
    from (2, 8) to (2, 9).

    Drawing again until an action is legal is drawing from the legal ones in proportion to their probability, 1/8 for a turn
    and 1/10 for a move, which we do in one draw.

    T counts all statements: the paper's example has T = 10, and then at most T - 2 of them are about one agent.

    Args:
        size: B, how many stories.
        length: T, at least 4.
        generator: source of the draws, on the device of the result.

    Returns:
        Words as indices into ``VOCABULARY``, padded with the null symbol, and the words of the locations of agent1 and
        agent2 after each statement (before it is placed, where an agent will be placed).
    """
    device = generator.device
    place = torch.randint(GRID, (size, 2, 2), generator=generator, device=device)  # (B, agents, xy) from 0
    facing = torch.randint(4, (size, 2), generator=generator, device=device)
    actor = torch.randint(2, (length, size), generator=generator, device=device)
    actor[:2], actor[2:4] = 0, 1
    chance = torch.rand(length, size, generator=generator, device=device, dtype=torch.float64)
    strides = torch.tensor(STRIDES, device=device)
    row = torch.arange(size, device=device)
    words = torch.zeros(length, size, STATEMENT_WORDS, dtype=torch.long, device=device)
    words[..., 0] = _AGENT + actor
    where = torch.empty(length, size, 2, dtype=torch.long, device=device)
    for t in range(length):
        who = actor[t]
        if t in (0, 2):
            words[t, :, 1], words[t, :, 2] = _IS, _AT
            words[t, :, 3] = _location(place[row, who])
        elif t in (1, 3):
            words[t, :, 1] = _FACES + facing[row, who]
        else:
            here, heading = place[row, who], facing[row, who]
            # Steps to the wall ahead: north and east count up to 9, south and west down to 0.
            along = here.gather(1, (1 - heading % 2)[:, None])[:, 0]
            possible = torch.where(heading < 2, GRID - 1 - along, along).clamp(max=MAX_MOVE)
            drawn = chance[t] * (0.5 + 0.1 * possible)
            turns = (drawn < 0.5) | (possible == 0)
            turn = (8 * drawn).long().clamp(max=3)
            steps = (1 + (10 * (drawn - 0.5)).long()).minimum(possible)
            facing[row, who] = torch.where(turns, turn, heading)
            place[row, who] = here + torch.where(turns, 0, steps)[:, None] * strides[heading]
            words[t, :, 1] = torch.where(turns, _FACES + turn, _MOVES - 1 + steps)
        where[t] = _location(place)
    return words, where


def _location(place: Tensor) -> Tensor:
    return LOCATIONS + GRID * place[..., 0] + place[..., 1]


def tell(words: Tensor) -> list[str]:
    """Statements ``(T, 4)`` of one story as lines of text."""
    return [" ".join(VOCABULARY[word] for word in line if word != NULL) for line in words.tolist()]
