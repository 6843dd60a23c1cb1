"""Networks around a core that reads a sequence, or a set of slots, and is asked for one answer."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core import RecurrentCore, SequenceReader, State, Tokens, feature_size, read, unroll
from ..cores.entnet import OutputModule
from ..cores.esbn import TemporalContextNorm
from ..data import sequences as data
from ..data.babi import Batch
from ..data.cbt import NULL, Windows
from ..encoders import SymbolEncoder


class SequenceSum(nn.Module):
    """A core that reads numbers one by one; a linear readout of all slots together after the last.

    A token is a linear map of the number, less the mean of all numbers, and of its mark, 1 or -1. So marked and unmarked
    numbers lie on opposite sides of zero, and whatever attends to the one by its key turns away from the other. The readout
    begins five times as large as torch's own: what a core gives out lies between -1 and 1, and the sums of the test are twice
    those of training, so each number has to be told by a small part of that room.

    Args:
        core: a core with a state.
        token_size: what number and mark are embedded to.
    """

    def __init__(self, core: RecurrentCore, token_size: int):
        super().__init__()
        self.core: RecurrentCore
        self.embed = nn.Linear(2, token_size, bias=False)
        self.core = core
        self.readout = nn.Linear(core.num_slots * core.slot_size, 1)
        with torch.no_grad():
            self.readout.weight.mul_(5.0)

    def forward(self, sequences: Tensor) -> Tensor:
        """The sums ``(B,)`` the core makes of ``sequences (B, T, 2)``."""
        slots, _ = self.unroll(sequences)
        return self.sums(slots[-1])

    def tokens(self, sequences: Tensor) -> Tokens:
        """Numbers and marks as a core reads them, ``(T, B, 1, F)``."""
        numbers, marks = sequences.transpose(0, 1).unbind(-1)
        return Tokens(self.embed(torch.stack([numbers - 0.5, 2.0 * marks - 1.0], dim=-1))[:, :, None])

    def unroll(self, sequences: Tensor) -> tuple[Tensor, State]:
        """The slots after every number, ``(T, B, K, D)``."""
        return unroll(self.core, self.tokens(sequences), self.core.initial_state(len(sequences)))

    def sums(self, slots: Tensor) -> Tensor:
        """The readout, ``(..., K, D)`` to ``(...)``."""
        return self.readout(slots.flatten(-2))[..., 0]


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


class SymbolReader(nn.Module):
    """A core that is shown symbols one after another, or a reader of all of them; a linear readout chooses an answer.

    Of a core it reads all slots after the last symbol. Every symbol that may occur is encoded once for a batch, however often
    it does.

    Args:
        core: a core with a state, or a reader.
        encoder: of a symbol.
        symbols: ``(n, 32, 32)`` uint8, kept with the weights.
        answers: from how many one is chosen.
        segments: the steps at which stretches begin that are normalised apart; None for no normalisation over time.
    """

    def __init__(
        self,
        core: RecurrentCore | SequenceReader,
        encoder: SymbolEncoder,
        symbols: Tensor,
        answers: int,
        segments: Sequence[int] | None,
    ):
        super().__init__()
        self.core: RecurrentCore | SequenceReader
        self.symbols: Tensor
        self.core, self.encoder = core, encoder
        self.register_buffer("symbols", symbols.clone())
        self.segments = segments
        self.norm = None if segments is None else TemporalContextNorm(encoder.size)
        self.readout = nn.Linear(feature_size(core), answers)

    def tokens(self, problems: Tensor, used: Tensor | None = None) -> Tokens:
        """Problems as a core reads them, ``(T, B, 1, F)``; see ``forward``."""
        vectors = self.encoder(self.symbols if used is None else self.symbols[used])[problems.t()]
        if self.norm is not None and self.segments is not None:
            starts = torch.zeros(problems.t().shape, dtype=torch.bool, device=problems.device)
            starts[list(self.segments)] = True
            vectors = self.norm(vectors, starts)
        return Tokens(vectors[:, :, None])

    def forward(self, problems: Tensor, used: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Scores of the answers, ``(B, answers)``, and the core's auxiliary loss; see ``core.read``.

        Args:
            problems: ``(B, T)``, numbers of symbols, or with ``used`` numbers of its entries.
            used: ``(U,)``, numbers of the symbols that may occur; None for all.
        """
        features, auxiliary = read(self.core, self.tokens(problems, used))
        return self.readout(features), auxiliary


class QuestionReader(nn.Module):
    """A core that reads a story a sentence a step, and is asked a question after the last: EntNet's model of bAbI.

    Henaff et al. 2017, section 2 and appendix A. A sentence is one token, ``sum_j f_j * e_j`` over its words (eq. 1), the
    masks f_j learned or 1; so is the question, with masks of its own. It is answered from the slots by eq. 6; a linear layer
    makes it as long as a slot where that differs. Words are drawn from N(0, 0.1), masks begin at 1, the null word is zero.

    Args:
        core: a core with a state.
        num_words: of the vocabulary, the null word counted.
        word_size: of an embedding.
        sizes: the words of the longest sentence, and of the longest question.
        masked: False for a bag of words, ``f = 1``.
        entities: words whose embeddings are the keys of an EntNet with tied keys, one a memory (its appendix C); none for
            keys of the core's own.
    """

    def __init__(
        self,
        core: RecurrentCore,
        num_words: int,
        word_size: int,
        sizes: tuple[int, int],
        *,
        masked: bool,
        entities: Sequence[int] = (),
    ):
        super().__init__()
        self.core: RecurrentCore
        self.entities = list(entities)
        self.core = core
        self.words = nn.Embedding(num_words, word_size, padding_idx=data.NULL)
        nn.init.normal_(self.words.weight[1:], std=0.1)
        self.masks = nn.ParameterList(torch.ones(size, word_size) for size in sizes) if masked else None
        self.query = nn.Linear(word_size, core.slot_size, bias=False) if core.slot_size != word_size else nn.Identity()
        self.answer = OutputModule(core.slot_size, num_words)

    def encode(self, words: Tensor, part: int) -> Tensor:
        """Sentences (part 0) or questions (part 1) ``(S, W)`` as vectors ``(S, word_size)``."""
        embedded = self.words(words)
        return (embedded if self.masks is None else embedded * self.masks[part]).sum(-2)

    def forward(self, batch: Batch) -> Tensor:
        """Scores of all words, ``(B, num_words)``."""
        scores: Tensor = self.answer(self.query(self.encode(batch.questions, 1)), self.read(batch))
        return scores

    def read(self, batch: Batch) -> Tensor:
        """The slots after what is told before each question, ``(B, K, D)``."""
        if self.entities:
            tokens = Tokens(
                self.encode(batch.sentences, 0).transpose(0, 1)[:, :, None], mask=batch.there.t()[..., None]
            )
            slots, _ = unroll(self.core, tokens, self.initial_state(len(batch.there)))
            return slots[batch.told - 1, batch.stretch]
        tokens, starts = self.tokens(batch)
        slots, _ = unroll(self.core, tokens, self.initial_state(1), starts)
        before = batch.there.sum(1).cumsum(0) - batch.there.sum(1)  # sentences of the stretches before
        return slots[before[batch.stretch] + batch.told - 1, 0]

    def initial_state(self, batch_size: int) -> State:
        """The core's, from the entities' embeddings where there are any."""
        if not self.entities:
            return self.core.initial_state(batch_size)
        return self.core.initial_state(batch_size, self.words.weight[self.entities].expand(batch_size, -1, -1))

    def nearest(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Which words each memory is nearest to after a story (the paper's Table 3).

        Returns:
            Cosine similarities of ``phi(H h_j)`` to the rows of R (eq. 6), the largest first, and the words, both
            ``(B, K, num_words)``. The paper says distance; but of its two nearest words the first has the larger number.
        """
        memory = self.read(batch)
        said = self.answer.phi(self.answer.H(memory).flatten(0, 1)).view_as(memory)
        similarity = F.normalize(said, dim=-1) @ F.normalize(self.answer.R.weight, dim=-1).t()
        return similarity.sort(dim=-1, descending=True)

    def tokens(self, batch: Batch) -> tuple[Tokens, Tensor]:
        """All stretches of stories as one sequence ``(T, 1, 1, word_size)``, and where in it each begins, ``(T, 1)``.

        So they are cut into pieces of different lengths and read side by side, and no step is spent on what is not there.
        """
        starts = torch.zeros_like(batch.there)
        starts[:, 0] = True
        return Tokens(self.encode(batch.sentences[batch.there], 0)[:, None, None]), starts[batch.there][:, None]


class CandidateReader(nn.Module):
    """EntNet that reads windows of words around candidates, and answers with the candidate whose memory fits the query best.

    Henaff et al. 2017, section 5.3: keys and first memories are the candidates' embeddings, and the answer is the
    distribution ``p_j = softmax_j(q . h_j)`` itself, so there is no decoder. The query's window has masks of its own.

    Departure: the paper trains by plain gradient descent, rate 0.001; our trainer is Adam's.

    Args:
        core: an EntNet with tied keys, whose tokens are words.
        num_words: of the vocabulary, null and unknown words counted.
        window: words of a window.
        dropout: of features of embeddings, in training.
    """

    def __init__(self, core: RecurrentCore, num_words: int, window: int, dropout: float):
        super().__init__()
        self.core: RecurrentCore
        self.core = core
        self.words = nn.Embedding(num_words, core.token_size, padding_idx=NULL)
        nn.init.normal_(self.words.weight[1:], std=0.1)
        self.masks = nn.Parameter(torch.ones(window, core.token_size))
        self.drop = nn.Dropout(dropout)

    def forward(self, batch: Windows) -> Tensor:
        """Scores of the candidates, ``(B, C)``; of candidates that are none, the least there is."""
        candidates = self.words(batch.candidates)  # (B, C, D)
        read = batch.windows.transpose(0, 1)  # (L, B, b)
        mask = (read != NULL) & batch.there.t()[..., None]
        tokens = Tokens(self.drop(self.words(read)), mask=mask)
        slots, _ = unroll(self.core, tokens, self.core.initial_state(len(candidates), candidates))
        query = (self.drop(self.words(batch.queries)) * self.masks).sum(1)
        fit = (slots[-1] @ query[..., None])[..., 0]
        return fit.masked_fill(batch.candidates == NULL, torch.finfo(fit.dtype).min)
