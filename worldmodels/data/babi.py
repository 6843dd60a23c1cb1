"""bAbI's question-answering tasks (Weston et al. 2015): reading the official files, and stories as tensors.

A file has a line for every sentence and every question, numbered from 1 in each story:

    1 Mary moved to the bathroom.
    2 Where is Mary?<tab>bathroom<tab>1

with the answer, one word (a list is one word with commas), and the numbers of the sentences it follows from.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import UserError

NUMBERS = tuple(range(1, 21))
NULL = 0  # the index of no word
NAMES = (
    *("1 supporting fact", "2 supporting facts", "3 supporting facts", "2 argument relations", "3 argument relations"),
    *("yes/no questions", "counting", "lists/sets", "simple negation", "indefinite knowledge", "basic coreference"),
    *("conjunction", "compound coreference", "time reasoning", "basic deduction", "basic induction"),
    *("positional reasoning", "size reasoning", "path finding", "agents' motivations"),
)

Words = tuple[str, ...]


class Question(NamedTuple):
    """A question and where it stands.

    Args:
        story: in which of the stories it is asked.
        told: how many of the story's sentences come before it.
        words: of the question, without its mark.
        answer: one word.
        supports: which sentences of the story it follows from, from 0.
        line: of the file, from 1.
    """

    story: int
    told: int
    words: Words
    answer: str
    supports: tuple[int, ...]
    line: int


class Told(NamedTuple):
    """What a file tells: the sentences of each story, and all questions."""

    stories: list[list[Words]]
    questions: list[Question]


def words(text: str) -> Words:
    """A sentence's words, in lower case, without full stop or question mark."""
    return tuple(re.sub(r"[.?]", " ", text.lower()).split())


def parse(lines: Iterable[str], name: str) -> Told:
    """Read the lines of a file.

    Args:
        lines: of the file.
        name: of the file, for errors.

    Raises:
        UserError: naming the first line that is not as it should be.
    """
    stories: list[list[Words]] = []
    questions: list[Question] = []
    at: dict[int, int] = {}  # the sentence of the story that a number stands for
    expected = 1
    for row, line in enumerate(lines, 1):
        here = f"{name}, line {row}", line
        number, _, text = line.strip(" \r\n").partition(" ")
        if not number.isdecimal() or not text.strip():
            raise _wrong(*here, "expected a number and a sentence")
        if int(number) == 1:
            stories.append([])
            at = {}
        elif int(number) != expected:
            raise _wrong(*here, f"expected the number {expected if stories else 1}, or 1 for a new story")
        expected = int(number) + 1
        if "\t" not in text:
            at[int(number)] = len(stories[-1])
            stories[-1].append(words(text))
            if not stories[-1][-1]:
                raise _wrong(*here, "expected words")
            continue
        parts = text.split("\t")
        if len(parts) != 3:
            raise _wrong(*here, "expected a question, its answer and the numbers of its sentences, with tabs between")
        asked, answer, supports = words(parts[0]), parts[1].strip().lower(), parts[2].split()
        if not asked or not answer or " " in answer:
            raise _wrong(*here, "expected a question, and an answer of one word")
        if any(not support.isdecimal() or int(support) not in at for support in supports):
            raise _wrong(*here, "expected the numbers of earlier sentences of this story")
        if not stories[-1]:
            raise _wrong(*here, "a question before the first sentence")
        which = tuple(at[int(support)] for support in supports)
        questions.append(Question(len(stories) - 1, len(stories[-1]), asked, answer, which, row))
    if not questions:
        raise UserError(f"{name} asks no question; expected a file of bAbI")
    return Told(stories, questions)


def _wrong(where: str, line: str, said: str) -> UserError:
    return UserError(f"{where}: {said}; got {line.rstrip()[:60]!r}")


def read(path: Path) -> Told:
    """Read a file; see ``parse``."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as text ({type(error).__name__}); expected a file of bAbI") from error
    return parse(lines, str(path))


def find(folder: Path, number: int) -> dict[str, Path]:
    """The files of a task in a folder, by "train" and "test"; what is not there is left out.

    Raises:
        UserError: no such folder, or several files for one part.
    """
    if not folder.is_dir():
        raise UserError(f"task.data={folder} is no folder; give the one with files like qa1_..._train.txt")
    found = {}
    for part in ("train", "test"):
        files = sorted(folder.glob(f"qa{number}_*_{part}.txt"))
        if len(files) > 1:
            raise UserError(f"{files[0]} and {files[1]} both look like task {number}'s {part} file; keep one")
        if files:
            found[part] = files[0]
    if not found:
        inside = sorted({file.parent for file in folder.rglob(f"qa{number}_*_test.txt")})
        hint = f"; did you mean task.data={inside[0]}?" if inside else f"; expected files like qa{number}_..._train.txt"
        raise UserError(f"task.data={folder} has no file of task {number}{hint}")
    return found


class Asked(NamedTuple):
    """Questions as tensors; a story is a stretch of one long row of sentences.

    Args:
        sentences: words ``(S, W)``, padded with the null word.
        first: where the stretch begins that is told before a question, ``(Q,)``.
        end: where it ends, ``(Q,)``.
        questions: words ``(Q, W')``.
        answers: ``(Q,)``; -1 for an answer that is no word of the training data, such as a list that occurs there nowhere.
    """

    sentences: Tensor
    first: Tensor
    end: Tensor
    questions: Tensor
    answers: Tensor


def vocabulary(told: Iterable[Told]) -> list[str]:
    """All words of sentences, questions and answers, in order; the index of a word is its place here plus one."""
    found: set[str] = set()
    for part in told:
        found.update(word for story in part.stories for sentence in story for word in sentence)
        found.update(word for question in part.questions for word in (*question.words, question.answer))
    return sorted(found)


def longest(told: Iterable[Told]) -> tuple[int, int]:
    """The words of the longest sentence, and of the longest question."""
    parts = list(told)
    sentences = max(len(sentence) for part in parts for story in part.stories for sentence in story)
    return sentences, max(len(question.words) for part in parts for question in part.questions)


def encode(told: Told, known: Sequence[str], sizes: tuple[int, int], most: int, name: str) -> Asked:
    """Stories and questions as indices of words.

    Args:
        told: the file.
        known: the vocabulary.
        sizes: W and W'; what is longer is refused.
        most: sentences of a story that count, the last before the question.
        name: of the file, for errors.

    Raises:
        UserError: a word that is not in the vocabulary, or a sentence that is too long.
    """
    index = {word: n for n, word in enumerate(known, 1)}
    flat = [sentence for story in told.stories for sentence in story]
    starts = torch.tensor([0] + [len(story) for story in told.stories]).cumsum(0).tolist()
    rows = [(flat, sizes[0]), ([question.words for question in told.questions], sizes[1])]
    padded = []
    for sentences, size in rows:
        for sentence in sentences:
            unknown = [word for word in sentence if word not in index]
            if unknown or len(sentence) > size:
                said = f"the word {unknown[0]!r}" if unknown else f"a sentence of more than {size} words"
                raise UserError(f"{name} has {said}, which the training data do not: {' '.join(sentence)!r}")
        padded.append(torch.tensor([[index[w] for w in s] + [NULL] * (size - len(s)) for s in sentences]))
    end = torch.tensor([starts[question.story] + question.told for question in told.questions])
    begin = torch.tensor([starts[question.story] for question in told.questions])
    answers = torch.tensor([index.get(question.answer, -1) for question in told.questions])
    return Asked(padded[0], torch.maximum(begin, end - most), end, padded[1], answers)


class Batch(NamedTuple):
    """Some questions with what is told before them; questions that begin with the same sentence share what is told.

    Args:
        sentences: words ``(P, L, W)`` of P stretches of stories, L of the longest.
        there: ``(P, L)``, which sentences there are, the first ones of a row.
        stretch: which of them a question is about, ``(B,)``.
        told: how many of its sentences come before the question, ``(B,)``.
        questions: words ``(B, W')``.
        answers: ``(B,)``.
    """

    sentences: Tensor
    there: Tensor
    stretch: Tensor
    told: Tensor
    questions: Tensor
    answers: Tensor


def gather(asked: Asked, which: Tensor) -> Batch:
    """The questions of these numbers ``(B,)``."""
    first, told = asked.first[which], (asked.end - asked.first)[which]
    begin, stretch = torch.unique(first, return_inverse=True)
    lengths = torch.zeros_like(begin).scatter_reduce(0, stretch, told, "amax")
    steps = torch.arange(int(lengths.max()), device=which.device)
    there = steps < lengths[:, None]
    sentences = asked.sentences[(begin[:, None] + steps).clamp(max=len(asked.sentences) - 1)]
    sentences = torch.where(there[..., None], sentences, NULL)
    return Batch(sentences, there, stretch, told, asked.questions[which], asked.answers[which])


def stories(asked: Asked) -> tuple[Tensor, Tensor]:
    """The first question of each story, and how many it has; stories that are longer than is read count as several."""
    begins = torch.ones_like(asked.first, dtype=torch.bool)
    begins[1:] = asked.first[1:] != asked.first[:-1]
    first = begins.nonzero()[:, 0]
    return first, torch.cat([first, first.new_tensor([len(begins)])]).diff()


def join(parts: Sequence[Asked]) -> Asked:
    """The questions of several tasks one after another."""
    shift = torch.tensor([0] + [len(part.sentences) for part in parts]).cumsum(0).tolist()
    return Asked(
        torch.cat([part.sentences for part in parts]),
        torch.cat([part.first + by for part, by in zip(parts, shift, strict=False)]),
        torch.cat([part.end + by for part, by in zip(parts, shift, strict=False)]),
        torch.cat([part.questions for part in parts]),
        torch.cat([part.answers for part in parts]),
    )


def split(told: Told, share: float) -> tuple[Told, Told]:
    """Training and validation: the last share of the questions, whole stories."""
    asked = len(told.questions)
    border = told.questions[max(1, min(asked - 1, round((1 - share) * asked)))].story
    return tuple(  # type: ignore[return-value]
        _stories(told, story_range) for story_range in (range(border), range(border, len(told.stories)))
    )


def _stories(told: Told, which: range) -> Told:
    questions = [q._replace(story=q.story - which.start) for q in told.questions if q.story in which]
    return Told(told.stories[which.start : which.stop], questions)


def lines(told: Told) -> Iterator[str]:
    """The lines of a file, as ``parse`` reads them."""
    of_story: list[list[Question]] = [[] for _ in told.stories]
    for question in told.questions:
        of_story[question.story].append(question)
    for sentences, questions in zip(told.stories, of_story, strict=True):
        asked, number, at = iter(questions), 0, list[int]()
        coming = next(asked, None)
        for place in range(len(sentences) + 1):
            while coming is not None and coming.told == place:
                number += 1
                supports = " ".join(str(at[n]) for n in coming.supports)
                yield f"{number} {' '.join(coming.words).capitalize()}? \t{coming.answer}\t{supports}"
                coming = next(asked, None)
            if place < len(sentences):
                number += 1
                at.append(number)
                yield f"{number} {' '.join(sentences[place]).capitalize()}."
