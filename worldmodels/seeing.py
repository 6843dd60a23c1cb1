"""How well a model says what will be seen of a world from some of its places, beside a copy of what is now seen."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .data.views import Views, ViewSource
from .encoders import pixels
from .errors import UserError
from .losses import polar_loss, polar_parts, polar_truth
from .metrics import balanced_accuracy, confusion_matrix, f1_scores, macro_f1
from .models.views import SpatialModel, ViewModel, ViewWorldModel
from .ranking import Imagined, score

BURN_IN = 5  # steps that fill the state before what is imagined is ranked
_VIEWS_AT_ONCE = 20_000  # of an evaluation, so that memory stays bounded


class ViewTest:
    """What a model is asked about the test episodes of one variant; draws are the same for every model, share and device.

    Args:
        source: the episodes and what was seen in them.
        seed: of the draws.
        polar: views are polar images.
        oracle: the model sees what it is asked.
    """

    def __init__(self, source: ViewSource, *, seed: int, polar: bool, oracle: bool):
        self.source, self.seed, self.polar, self.oracle = source, seed, polar, oracle

    def _generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed * 1_000_003)

    def scored(self, model: Any, share: float, limit: int | None) -> dict[str, float]:
        """The measures of what the model says where a share of the views report."""
        tally = PolarTally() if self.polar else PixelTally()
        generator = self._generator()
        for _, views in self.source.whole(generator, _VIEWS_AT_ONCE, limit=limit):
            reported = self.source.reporting(views, share, generator)
            tally.add(*said_and_seen(model, views, reported, oracle=self.oracle))
        return tally.scores()

    def copied(self) -> dict[str, float]:
        """The scores of saying what is now seen at the queried places, all of which a copy may look at."""
        tally = PixelTally()
        for rows, watched in self.source.whole(self._generator(), _VIEWS_AT_ONCE):
            views = watched.at(slice(1, None))
            states = self.source.episodes.arrays["observations"][rows[:-1]]
            now = as_floats(self.source.env.crops(states, views.positions.long())[views.mask])
            tally.add(2.0 * now - 1.0, as_floats(views.observations[views.mask]))
        return tally.scores()

    def with_less(self, model: SpatialModel, removed: Sequence[int]) -> dict[str, dict[str, float]]:
        """Scores with so many random modules taken away."""
        scores = {}
        order = torch.randperm(model.num_slots, generator=torch.Generator().manual_seed(self.seed)).tolist()
        for count in removed:
            if count < model.num_slots:
                less = copy.deepcopy(model)
                less.core = model.core.keep(sorted(order[count:]))  # type: ignore[attr-defined]
                scores[str(count)] = self.scored(less, 1.0, None)
        return scores

    @torch.no_grad()
    def rolled(
        self, model: ViewModel, prompt: int, imagined: int, number: int = 100
    ) -> tuple[Tensor, Tensor, dict[str, list[float]]]:
        """Rollouts of crops as in the paper's appendix F.1.1: prompted, then fed with what was said, stitched on a grid.

        Args:
            model: the model.
            prompt: steps that are seen before.
            imagined: S, steps of the rollout.
            number: of episodes.

        Returns:
            Frames that were said and those that were (both ``(S, B, H, W)`` in [0, 1]) and the balanced accuracy of every
            step, with "copy" that of the prompt's last frame.
        """
        env, episodes = self.source.env, self.source.episodes
        generator, steps, number = self._generator(), prompt + imagined, min(number, len(episodes))
        rows = episodes.starts[:number] + torch.arange(steps, device=episodes.device)[:, None]
        views = self.source.seen(rows, generator)
        along, first = env.image_size // env.crop_size, (env.image_size % env.crop_size) // 2 + env.crop_size // 2
        line = first + env.crop_size * torch.arange(along, device=episodes.device)
        grid = torch.cartesian_prod(line, line).expand(steps, number, -1, 2)
        said = model.rollout(views.at(slice(prompt)), views.positions[prompt:], grid[prompt:].float())
        true = as_floats(env.crops(episodes.arrays["observations"][rows], grid))
        was, last = true[prompt:], true[prompt - 1].expand_as(said)
        accuracy: dict[str, list[float]] = {"model": [], "copy": []}
        for name, guess in (("model", said), ("copy", last)):
            for t in range(imagined):
                matrix = confusion_matrix((guess[t] > 0.5).flatten(), (was[t] > 0.5).flatten(), 2)
                accuracy[name].append(balanced_accuracy(matrix))
        return _stitched(said, along), _stitched(was, along), accuracy

    def ranked(self, model: ViewWorldModel, horizons: Sequence[int], limit: int | None, variant: str) -> dict[str, Any]:
        """Hits@1 and MRR of imagined states among all test episodes, see ``ranking.score``."""
        episodes, generator = self.source.episodes, self._generator()
        shortest = BURN_IN + max(horizons)
        index = torch.nonzero(episodes.lengths >= shortest)[:, 0][:limit]
        if len(index) < 2:
            raise UserError(f"{len(index)} test episodes of {variant!r} reach {shortest} steps; give smaller horizons")
        slots, imagined = [], []
        for rows, views in self.source.whole(generator, _VIEWS_AT_ONCE, limit=limit, shortest=shortest):
            seen, states = model.observe(views)
            doing = [
                self.source.seen(
                    rows[BURN_IN : BURN_IN + 1], generator, action_rows=rows[BURN_IN + h : BURN_IN + h + 1]
                ).at(0)
                for h in range(max(horizons))
            ]
            slots.append(seen.transpose(0, 1))
            imagined.append(model.rollout(states[BURN_IN], doing))
        return score(Imagined(episodes, index, BURN_IN, torch.cat(slots), torch.cat(imagined, dim=1)), horizons)

    def example(self, model: ViewModel, episode: int, longest: int) -> tuple[Tensor, Tensor]:
        """What a model says of the first steps of an episode, and what there was to see."""
        episodes = self.source.episodes
        steps = 1 + min(longest, int(episodes.lengths[episode]))
        rows = episodes.starts[episode] + torch.arange(steps, device=episodes.device)[:, None]
        return said_and_seen(model, self.source.seen(rows, self._generator()), oracle=self.oracle)


def said_and_seen(
    model: nn.Module, views: Views, reported: Views | None = None, *, oracle: bool
) -> tuple[Tensor, Tensor]:
    """What a model says of all steps but the first, and what there was to see: ``(M, C, H, W)`` both.

    Args:
        model: the model.
        views: what there was to see, ``(T, B)``.
        reported: what the model sees; None for all.
        oracle: the model sees what it is asked.
    """
    read = views if reported is None else reported
    asked = views.at(slice(1, None))
    said = model(read.at(slice(1, None) if oracle else slice(None, -1)), asked.positions, asked.mask)
    return said, as_floats(asked.observations[asked.mask])


class PixelTally:
    """Balanced accuracy and F1 of pixels at the threshold 0.5."""

    def __init__(self) -> None:
        self.matrix: Tensor | int = 0

    def add(self, said: Tensor, truth: Tensor) -> None:
        """Count predicted logits against what there was."""
        self.matrix = self.matrix + confusion_matrix(said > 0.0, truth > 0.5, 2)

    def scores(self) -> dict[str, float]:
        """The measures."""
        assert isinstance(self.matrix, Tensor)
        return {"balanced_accuracy": balanced_accuracy(self.matrix), "f1": float(f1_scores(self.matrix)[1])}


class PolarTally:
    """S2RM's four measures of predicted polar images."""

    def __init__(self) -> None:
        self.friendly: Tensor | int = 0
        self.types: Tensor | int = 0
        self.sums = torch.zeros(3, dtype=torch.float64)  # of the squared error, of the loss, of the views

    def add(self, said: Tensor, truth: Tensor) -> None:
        """Count predicted maps against the true images."""
        if len(said) == 0:
            return
        friendly, types, hecs = polar_parts(said)
        true_friendly, true_types, true_hecs = polar_truth(truth)
        self.friendly = self.friendly + confusion_matrix(friendly > 0.0, true_friendly > 0.5, 2)
        self.types = self.types + confusion_matrix(types.argmax(1), true_types, types.shape[1])
        n = len(said)
        values = [n * F.mse_loss(hecs, true_hecs).double(), n * polar_loss(said, truth).total.double()]
        self.sums += torch.stack([*values, values[0].new_tensor(n)]).cpu()

    def scores(self) -> dict[str, float]:
        """The measures; the larger the better."""
        assert isinstance(self.friendly, Tensor) and isinstance(self.types, Tensor)
        there = self.types.sum(1)[:-1].nonzero()[:, 0]  # types that occur; the last class is "no unit"
        squared, loss, n = self.sums.tolist()
        return {
            "friendly_f1": float(f1_scores(self.friendly)[1]),
            "unit_type_f1": macro_f1(self.types, there),
            "negative_mse": -squared / n,
            "log_likelihood": -loss / n,
        }


def as_floats(observations: Tensor) -> Tensor:
    """Views as floats with channels first: pictures are brought to [0, 1], polar images stay as they are."""
    return pixels(observations) if observations.dtype == torch.uint8 else observations


def _stitched(patches: Tensor, along: int) -> Tensor:
    """Patches ``(T, B, along^2, C, h, w)`` side by side, their channels' mean: ``(T, B, H, W)``."""
    rows = patches.mean(3).unflatten(2, (along, along))  # (T, B, i, j, h, w)
    return rows.permute(0, 1, 2, 4, 3, 5).flatten(4).flatten(2, 3)
