"""The End-To-End Memory Network: a question looks at all sentences of a story at once, several times over.

Sukhbaatar, Szlam, Weston & Fergus 2015, "End-To-End Memory Networks", sections 2 and 4.

Departures:
- Linear start: the paper puts the softmax back when the loss on validation data no longer falls; ours after a share of the
  training's steps, so that a training that goes on after a stop is the same training.
- Random noise: the paper adds one tenth of empty memories in training, so that no sentence has always the same time. Ours
  leaves the times of empty memories out, and not the empty memories in, which no answer needs.
"""

import torch
from torch import Tensor, nn

from ..core import at_least_one
from ..data import sequences
from ..data.babi import NULL, Batch


class MemoryNetwork(nn.Module):
    """K hops over a memory of sentences, embeddings tied between hops ("adjacent").

    For sentences of words x_ij, of which l_j is the position encoding, and a question q:

    - ``m_i = sum_j l_j * A x_ij + T_A(i)``, ``c_i = sum_j l_j * C x_ij + T_C(i)``, time i counted back from the question;
      ``u = sum_j l_j * B q_j`` (section 4.1);
    - K times: ``p_i = softmax_i(u . m_i)`` (eq. 1), ``o = sum_i p_i c_i`` (eq. 2), ``u <- u + o`` (eq. 4);
    - the scores of all words are ``W u`` (eq. 3).

    Embeddings of the k-th hop are ``A_k = C_(k-1)``, ``B = A_1``, ``W = C_K`` (section 2.2), and so are T_A and T_C.
    ``l_kj = (1 - j/J) - (k/d) (1 - 2j/J)`` of the J words of a sentence. Weights are drawn from N(0, 0.1); the null word's
    embedding is zero.

    Args:
        num_words: of the vocabulary, the null word counted.
        word_size: d.
        num_sentences: of the memory; times beyond it count as the last.
        hops: K.
        position_encoding: False for a bag of words, ``l = 1``.
        linear_start: the share of the training in which all softmaxes but the answer's are left out.
        noise: in training the time goes on by one more than one, with this probability, at each sentence.
    """

    def __init__(
        self,
        num_words: int,
        word_size: int,
        num_sentences: int,
        *,
        hops: int = 3,
        position_encoding: bool = True,
        linear_start: float = 0.1,
        noise: float = 0.1,
    ):
        super().__init__()
        at_least_one(word_size=word_size, num_sentences=num_sentences, hops=hops)
        self.word_size, self.hops = word_size, hops
        self.position_encoding, self.linear_start, self.noise = position_encoding, linear_start, noise
        self.linear = False
        # A_1, A_2, ..., C_K side by side, so that a word is looked up once for all hops.
        self.words = nn.Parameter(torch.randn(num_words, (hops + 1) * word_size) * 0.1)
        self.time = nn.Parameter(torch.randn(num_sentences, (hops + 1) * word_size) * 0.1)
        with torch.no_grad():
            self.words[NULL] = 0.0
        self.words.register_hook(_without_null)

    def anneal(self, done: float) -> None:
        """Leave the softmaxes out at the beginning; see ``training.Annealed``."""
        self.linear = done < self.linear_start

    def forward(self, batch: Batch) -> Tensor:
        """Scores of all words, ``(B, num_words)``."""
        return self._run(batch)[0]

    def look(self, batch: Batch) -> Tensor:
        """How much each hop attends to each sentence, ``(B, K, L)``, sums 1."""
        return self._run(batch)[1]

    def _run(self, batch: Batch) -> tuple[Tensor, Tensor]:
        stories = self.words.new_zeros(*batch.there.shape, self.words.shape[1])
        stories[batch.there] = self._encode(batch.sentences[batch.there], self.words)
        there = torch.arange(stories.shape[1], device=stories.device) < batch.told[:, None]
        memory = (stories[batch.stretch] + self.time[self._times(there)]).unflatten(-1, (self.hops + 1, -1))
        u = self._encode(batch.questions, self.words[:, : self.word_size])
        looks = []
        for k in range(self.hops):
            fit = (memory[:, :, k] @ u[..., None])[..., 0]
            if self.linear:
                p = torch.where(there, fit, 0.0)
            else:
                p = torch.softmax(fit.masked_fill(~there, torch.finfo(fit.dtype).min), dim=-1)
            u = u + (p[:, None] @ memory[:, :, k + 1])[:, 0]
            looks.append(p)
        return u @ self.words[:, -self.word_size :].t(), torch.stack(looks, 1)

    def _encode(self, sentences: Tensor, words: Tensor) -> Tensor:
        """``sum_j l_j * words[x_j]`` of sentences ``(S, W)``, ``(S, .)``."""
        if not self.position_encoding:
            return nn.functional.embedding_bag(sentences, words, mode="sum", padding_idx=NULL)
        j = torch.arange(1, sentences.shape[1] + 1, device=words.device)
        along = (j / (sentences != NULL).sum(1, keepdim=True).clamp_min(1))[..., None]  # j / J
        k = torch.arange(1, self.word_size + 1, device=words.device).repeat(words.shape[1] // self.word_size)
        # l = 1 - j/J - k/d + 2 (k/d) (j/J), so two sums are enough, one of them weighted with j/J.
        looked = words[sentences]
        plain, weighted = looked.sum(1), (looked * along).sum(1)
        return plain * (1 - k / self.word_size) + weighted * (2 * k / self.word_size - 1)

    def _times(self, there: Tensor) -> Tensor:
        """The time of each sentence, counted back from the question, ``(B, L)``."""
        steps = there.long()
        if self.training and self.noise:
            steps = steps + (there & (torch.rand(there.shape, device=there.device) < self.noise))
        back = steps.flip(1).cumsum(1).flip(1) - 1
        return back.clamp(0, len(self.time) - 1)


class StoryMemory(MemoryNetwork):
    """A memory network for the grid world, asked where both agents are, see ``StoryReader``.

    Args:
        word_size: d.
        num_sentences: of the memory.
        hops: K.
    """

    def __init__(self, word_size: int, num_sentences: int, *, hops: int):
        super().__init__(len(sequences.VOCABULARY), word_size, num_sentences, hops=hops)
        self.asked: Tensor
        self.register_buffer("asked", sequences.QUESTIONS.clone(), persistent=False)

    def forward(self, words: Tensor, first: int) -> Tensor:  # type: ignore[override]
        """Scores of all words after each statement from the ``first`` on, ``(T - first, B, 2, V)``, of ``words (T, B, 4)``.

        It looks at the whole story again for every question, so asking after every statement costs so many times as much.
        """
        T, B = words.shape[:2]
        stretch, questions = torch.arange(B, device=words.device).repeat_interleave(2), self.asked.repeat(B, 1)
        said = []
        for told in range(first + 1, T + 1):
            sentences = words[:told].transpose(0, 1)
            there = torch.ones(B, told, dtype=torch.bool, device=words.device)
            batch = Batch(sentences, there, stretch, torch.full_like(stretch, told), questions, questions[:, 0])
            said.append(super().forward(batch).unflatten(0, (B, 2)))
        return torch.stack(said)


def _without_null(gradient: Tensor) -> Tensor:
    gradient = gradient.clone()
    gradient[NULL] = 0.0
    return gradient
