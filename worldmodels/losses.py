"""Losses of world models: pure functions of tensors."""

from typing import Annotated, Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from .errors import UserError
from .ranges import NOT_NEGATIVE, POSITIVE, SHARE

NEGATIVES = ("cswm", "paper", "time_aligned")
HINGE_ON = ("energy", "distance")


def energy(slots: Float[Tensor, "*B K D"], target: Float[Tensor, "*B K D"], sigma: float = 0.5) -> Float[Tensor, "*B"]:
    """Squared distance of two sets of aligned slots: ``H = 1 / (2 sigma^2) * 1/K sum_k ||z_k - z'_k||^2``.

    C-SWM's equation 5 with the scale and the mean over slots of the authors' code (the paper writes the squared
    Euclidean distance without a scale).

    Args:
        slots: ``(..., K, D)``.
        target: ``(..., K, D)``.
        sigma: scale; 0.5 in the authors' code, which makes the factor 2.

    Returns:
        ``(...)``.
    """
    return (0.5 / sigma**2) * (slots - target).square().sum(-1).mean(-1)


class ContrastiveLoss(NamedTuple):
    """The contrastive loss and its two terms, scalars; ``total = positive + negative``."""

    total: Tensor
    positive: Tensor
    negative: Tensor


def draw_negatives(
    episode: Int[Tensor, " B"],
    step: Int[Tensor, " B"],
    *,
    time_aligned: bool = False,
    in_episode: float = 0.0,
    self_pairs: bool = False,
    but_next: bool = False,
    generator: torch.Generator | None = None,
) -> Int[Tensor, " B"]:
    """For each row of a batch, the row that serves as its negative.

    A share ``in_episode`` of the rows gets another step of the same episode, uniformly; the others get any other row
    (the authors permute the batch; ours never pairs a row with itself) or, ``time_aligned``, a row of another episode at
    the same step (Biza et al. 2021). A row for which the batch holds no such partner gets any other row.

    Args:
        episode: which episode each row is from, ``(B,)``.
        step: which step of it, ``(B,)``.
        time_aligned: negatives across episodes have the same step.
        in_episode: share of negatives from the same episode, 0 to 1.
        self_pairs: allow a row to be its own negative, as the authors' permutation does.
        but_next: never a row that holds the next step of the same episode, as long as the batch has another.
        generator: source of the draws, on the rows' device.

    Returns:
        Row numbers, ``(B,)``.

    Raises:
        UserError: a share outside [0, 1], or a single row.
    """
    B = len(episode)
    if B < 2 and not self_pairs:
        raise UserError("a batch of one row has no negative; draw at least two")
    if not 0.0 <= in_episode <= 1.0:
        raise UserError(f"in_episode is {in_episode}; it is a share, so give 0 to 1")
    same_episode = episode[:, None] == episode
    other_step = step[:, None] != step
    another_row = ~torch.eye(B, dtype=torch.bool, device=episode.device)
    everything = torch.ones_like(another_row)
    across = ~same_episode & ~other_step if time_aligned else everything if self_pairs else another_row
    inside = same_episode & (everything if self_pairs else other_step)
    fallback = everything if self_pairs else another_row
    allowed = ~(same_episode & (step[:, None] + 1 == step)) if but_next else everything
    drawn = torch.rand(B, generator=generator, device=episode.device)
    candidates = torch.where((drawn < in_episode)[:, None], inside, across) & allowed
    for wider in (fallback & allowed, fallback):
        candidates = torch.where(candidates.any(1, keepdim=True), candidates, wider)
    order = torch.rand(B, B, generator=generator, device=episode.device)
    return order.masked_fill_(~candidates, -1.0).argmax(dim=1)


def refuse_unknown_forms(negatives: Any, hinge_on: Any) -> None:
    """Refuse forms of the contrastive loss that there are not.

    Raises:
        UserError: naming those that there are.
    """
    if negatives not in NEGATIVES:
        raise UserError(f"negatives is {negatives!r}; expected one of {list(NEGATIVES)}")
    if hinge_on not in HINGE_ON:
        raise UserError(f"hinge_on is {hinge_on!r}; expected one of {list(HINGE_ON)}")


def contrastive(
    slots: Float[Tensor, "B K D"],
    pred_slots: Float[Tensor, "B K D"],
    next_slots: Float[Tensor, "B K D"],
    *,
    episode: Int[Tensor, " B"] | None = None,
    step: Int[Tensor, " B"] | None = None,
    negatives: str = "cswm",
    in_episode: Annotated[float, SHARE] = 0.0,
    hinge: Annotated[float, POSITIVE] = 1.0,
    hinge_on: str = "energy",
    displacement: Annotated[float, NOT_NEGATIVE] = 0.0,
    acted: Float[Tensor, "B K A"] | None = None,
    sigma: Annotated[float, POSITIVE] = 0.5,
    self_pairs: bool = False,
    generator: torch.Generator | None = None,
) -> ContrastiveLoss:
    """C-SWM's contrastive loss: ``L = H + max(0, gamma - H~)`` averaged over the batch (eq. 6).

    ``H = energy(pred_slots, next_slots)``. The negative is another row n of the batch (``draw_negatives``):

    - "cswm", the authors' code: ``H~ = energy(z_t, z_t[n])``.
    - "paper", equation 5: ``H~ = energy(z~, z_{t+1})`` with ``z~ = z_t[n]``; n is not the step t + 1 itself.
    - "time_aligned", Biza et al. 2021: as "cswm", with n at the same step of another episode.

    Args:
        slots: encoded observations z_t, ``(B, K, D)``.
        pred_slots: predicted next slots, ``(B, K, D)``.
        next_slots: encoded next observations z_{t+1}, ``(B, K, D)``.
        episode: ``(B,)``; None: every row is from an episode of its own.
        step: ``(B,)``; None: all rows are at the same step.
        negatives: which form, see above.
        in_episode: share of negatives from the same episode. With none, an encoder of worlds whose looks change from
            episode to episode learns to tell episodes apart, not states.
        hinge: gamma.
        hinge_on: "energy", as C-SWM; or "distance", its square root, ``max(0, gamma - sqrt(H~))``, the margin of Hadsell et
            al. 2006. The gradient of the energy vanishes with the difference of two states, so an object that was given
            little room is never given more, as long as others keep most negatives beyond the hinge; the gradient of the
            distance does not.
        displacement: weight of a second hinge, where actions belong to objects: on the average, an action must displace the
            slot it is done to. With ``m_a`` the mean of ``z_{t+1,k} - z_{t,k}`` over the rows with action a, which is done to
            slot k, it is the mean over actions of ``max(0, gamma - sqrt(1 / (2 sigma^2) * ||m_a||^2 / K))``. Why: as long as
            an object's moves are not predicted, what its slot shows of it only costs, so some slots show nothing, and what is
            not shown is never predicted. And why the mean: a hinge on every single move is also met by slots that are
            folded, with neighbouring cells far apart in any direction, of which no core learns which objects are neighbours;
            under the mean, moves in one direction must agree.
        acted: what was done to each slot, one-hot, ``(B, K, A)``, zeros for a slot nothing was done to; ``displacement``
            needs it.
        sigma: scale of the energy.
        self_pairs: allow a row to be its own negative.
        generator: source of the draws.

    Returns:
        The loss and its two terms.
    """
    refuse_unknown_forms(negatives, hinge_on)
    if displacement < 0.0:
        raise UserError(f"displacement is {displacement}; it is a weight, so give at least 0")
    B = len(slots)
    episode = torch.arange(B, device=slots.device) if episode is None else episode
    step = torch.zeros(B, dtype=torch.int64, device=slots.device) if step is None else step
    row = draw_negatives(
        episode,
        step,
        time_aligned=negatives == "time_aligned",
        in_episode=in_episode,
        self_pairs=self_pairs,
        but_next=negatives == "paper",
        generator=generator,
    )
    anchor = next_slots if negatives == "paper" else slots
    positive = energy(pred_slots, next_slots, sigma).mean()
    apart = energy(anchor, slots[row], sigma)
    if hinge_on == "distance":
        apart = (apart + 1e-12).sqrt()  # the root has no gradient at 0
    negative = torch.relu(hinge - apart).mean()
    if displacement:
        if acted is None:
            raise UserError(f"displacement is {displacement}, but acted does not say what was done to which slot")
        count = acted.sum(0).clamp(min=1.0)  # (K, A)
        moved = torch.einsum("bka,bkd->kad", acted, next_slots - slots) / count[..., None]
        apart = ((0.5 / sigma**2) * moved.square().sum(-1) / len(moved) + 1e-12).sqrt()
        negative = negative + displacement * torch.relu(hinge - apart).mean()
    return ContrastiveLoss(positive + negative, positive, negative)


UNIT_TYPES = 9


class PolarLoss(NamedTuple):
    """The loss of predicted polar images and its three terms, scalars; ``total`` is their sum."""

    total: Tensor
    friendly: Tensor
    unit_type: Tensor
    hecs: Tensor


def polar_parts(maps: Float[Tensor, "M C I J"]) -> tuple[Tensor, Tensor, Tensor]:
    """Predicted maps: friendly ``(M, I, J)``, unit type or none ``(M, 10, I, J)``, HECS ``(M, 4, I, J)``."""
    friendly, unit_type, hecs = maps.split([1, UNIT_TYPES + 1, 4], dim=1)
    return friendly[:, 0], unit_type, hecs


def polar_truth(images: Float[Tensor, "M C I J"]) -> tuple[Tensor, Tensor, Tensor]:
    """What polar images show: friendly marker, index of the unit type or 9 for none ``(M, I, J)``, HECS ``(M, 4, I, J)``."""
    types = images[:, 1 : 1 + UNIT_TYPES]
    unit_type = torch.where(types.sum(1) > 0, types.argmax(1), UNIT_TYPES)
    return images[:, 0], unit_type, images[:, 1 + UNIT_TYPES : 5 + UNIT_TYPES]


def polar_loss(maps: Float[Tensor, "M C I J"], images: Float[Tensor, "M D I J"]) -> PolarLoss:
    """S2RM's objective for polar images (appendix E.4.4), a sum of three means over all pixels.

    The binary cross-entropy of the friendly markers, the cross-entropy of the unit types and the mean squared error of
    health, energy, cooldown and shields (HECS). "No unit" is a tenth type. The height is not predicted: the paper's three
    terms leave it out.

    Args:
        maps: predicted, 1 + 10 + 4 channels. Of no maps at all (M = 0) the loss is 0, still with a graph to go back through.
        images: true, their first 14 channels count.
    """
    if len(maps) == 0:
        none = maps.sum()
        return PolarLoss(none, none, none, none)
    friendly, unit_type, hecs = polar_parts(maps)
    true_friendly, true_type, true_hecs = polar_truth(images)
    first = F.binary_cross_entropy_with_logits(friendly, true_friendly)
    second = F.cross_entropy(unit_type, true_type)
    third = F.mse_loss(hecs, true_hecs)
    return PolarLoss(first + second + third, first, second, third)
