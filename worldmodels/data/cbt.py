"""The Children's Book Test (Hill et al. 2016): reading the official files, and the windows of words around candidates.

An example of a file is twenty lines with a number and a sentence, words apart by spaces, and a twenty-first with the query,
in which ``XXXXX`` stands for a word, the word, and after the last tab the candidates for it, apart by ``|``; then an empty
line.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import UserError

KINDS = ("NE", "CN", "V", "P")
"""What the missing word is: a named entity, a common noun, a verb or a preposition."""

BLANK = "xxxxx"
SENTENCES = 20
NULL, UNKNOWN = 0, 1  # the indices of no word, and of a word that is not in the vocabulary

Words = tuple[str, ...]


class Example(NamedTuple):
    """A passage and a sentence that lacks a word.

    Args:
        passage: its twenty sentences in one row of words, in lower case.
        query: the sentence, with the blank.
        answer: the word.
        candidates: for it.
    """

    passage: Words
    query: Words
    answer: str
    candidates: Words


def parse(lines: Iterable[str], name: str) -> list[Example]:
    """Read the lines of a file.

    Args:
        lines: of the file.
        name: of the file, for errors.

    Raises:
        UserError: naming the first line that is not as it should be.
    """
    examples: list[Example] = []
    passage: list[str] = []
    expected, row = 1, 0
    for row, line in enumerate(lines, 1):
        line = line.strip(" \r\n")
        here = f"{name}, line {row}", line
        if not line and expected == 1:
            continue
        number, _, text = line.partition(" ")
        if number != str(expected) or not text.strip():
            raise _wrong(*here, f"expected the number {expected} and a sentence")
        if expected <= SENTENCES:
            passage += text.lower().split()
            expected += 1
            continue
        parts = text.lower().split("\t")
        query, candidates = tuple(parts[0].split()), tuple(word.strip() for word in parts[-1].split("|"))
        answer = parts[1].strip() if len(parts) > 1 else ""
        if len(parts) < 3 or query.count(BLANK) != 1:
            raise _wrong(*here, "expected a query with one XXXXX, its word and the candidates, with tabs between")
        if not all(candidates) or any(" " in word for word in candidates) or len(set(candidates)) < 2:
            raise _wrong(*here, "expected candidates of one word each, with | between")
        if answer not in candidates:
            raise _wrong(*here, "the answer is none of the candidates")
        examples.append(Example(tuple(passage), query, answer, tuple(dict.fromkeys(candidates))))
        passage, expected = [], 1
    if expected > 1:
        raise UserError(f"{name} ends after line {row}, in an example; expected {SENTENCES} sentences and a query")
    if not examples:
        raise UserError(f"{name} holds no example; expected a file of the Children's Book Test")
    return examples


def _wrong(where: str, line: str, said: str) -> UserError:
    return UserError(f"{where}: {said}; got {line[:60]!r}")


def read(path: Path) -> list[Example]:
    """Read a file; see ``parse``."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"{path} cannot be read as text ({type(error).__name__}); expected a file of the test"
        ) from error
    return parse(lines, str(path))


def find(folder: Path, kind: str) -> dict[str, Path]:
    """The official files of a kind in a folder, by "train", "validation" and "test".

    Raises:
        UserError: one is not there.
    """
    names = {"train": "train", "validation": "valid_2000ex", "test": "test_2500ex"}
    found = {part: folder / f"cbtest_{kind}_{name}.txt" for part, name in names.items()}
    for file in found.values():
        if not file.is_file():
            raise UserError(f"{file} does not exist; task.data is the folder data of the Children's Book Test")
    return found


def vocabulary(examples: Iterable[Example], least: int) -> list[str]:
    """The words that occur so often, and all candidates; the index of a word is its place here plus two."""
    counts: Counter[str] = Counter()
    candidates: set[str] = set()
    for example in examples:
        counts.update(example.passage)
        counts.update(example.query)
        candidates.update(example.candidates)
    return sorted({word for word, count in counts.items() if count >= least} | candidates)


class Windows(NamedTuple):
    """Examples as tensors.

    Args:
        windows: b words around every place in a passage where a candidate stands, ``(E, L, b)``, in order.
        there: ``(E, L)``, which of them there are, the first ones of a row.
        queries: b words around the blank, ``(E, b)``.
        candidates: ``(E, C)``, padded with the null word.
        answers: which candidate is right, ``(E,)``.
    """

    windows: Tensor
    there: Tensor
    queries: Tensor
    candidates: Tensor
    answers: Tensor


def encode(examples: Sequence[Example], known: Sequence[str], size: int) -> Windows:
    """The windows of examples; words beyond the ends of a passage or a query are null words.

    Args:
        examples: as they were read.
        known: the vocabulary.
        size: b, odd.
    """
    index = {word: n for n, word in enumerate(known, 2)}
    half = size // 2
    windows, queries = [], []
    for example in examples:
        row = [NULL] * half + [index.get(word, UNKNOWN) for word in example.passage] + [NULL] * half
        at = [n for n, word in enumerate(example.passage) if word in example.candidates]
        windows.append([row[n : n + size] for n in at])
        asked = [NULL] * half + [index.get(word, UNKNOWN) for word in example.query] + [NULL] * half
        blank = example.query.index(BLANK)
        queries.append(asked[blank : blank + size])
    most, widest = max(1, *map(len, windows)), max(len(example.candidates) for example in examples)
    padded = torch.tensor([row + [[NULL] * size] * (most - len(row)) for row in windows], dtype=torch.int32)
    there = torch.arange(most) < torch.tensor([len(row) for row in windows])[:, None]
    offered = [[index.get(word, UNKNOWN) for word in example.candidates] for example in examples]
    return Windows(
        padded,
        there,
        torch.tensor(queries, dtype=torch.int32),
        torch.tensor([row + [NULL] * (widest - len(row)) for row in offered], dtype=torch.int32),
        torch.tensor([example.candidates.index(example.answer) for example in examples]),
    )
