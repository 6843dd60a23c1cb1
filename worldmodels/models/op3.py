"""OP3: slots that are inferred by refining a first guess, frame by frame, and dynamics that guess the next.

Veerapaneni et al. 2019, "Entity Abstraction in Visual Model-Based Reinforcement Learning", sections 3.1 to 3.3, whose
inference is that of Greff et al. 2019, "Multi-Object Representation Learning with Iterative Variational Inference" (IODINE).
Sizes, rounds and weights of losses are those of the authors' code as Weis et al. 2020 and NPS (Goyal et al. 2021, Tables 5, 9
and 10) use it.

Departures:
- The likelihood of a pixel is a mixture of normal densities, as in the paper; the authors' code divides the exponent by the
  number of colours, which makes it flatter.
- The mean colours pass a logistic function, as those of all our slot decoders do.
- In evaluation nothing is drawn but the first guess, by which slots differ, and that is always the same; the code goes on
  drawing.
- The loss is per pixel, so that it does not grow with the frame. Gradients and likelihoods are normalised as there, without
  weights of their own, since a layer follows.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core import RecurrentCore, State, Tokens
from ..decoders import SlotDecoder, pixel_places
from ..errors import UserError

_STD = 0.1  # of a pixel's colours
_KL_WEIGHT = 0.01  # beta of the authors' code
_FIRST_ROUNDS, _ROUNDS = 4, 2  # of refinement, on the first frame and on each later one
_SMALLEST_VARIANCE = 1e-5


class OP3(nn.Module):
    """Frames, one after another, to slots ``h_k = [d_k, z_k]``: d_k follows from the past, z_k is drawn from a posterior.

    - Decoding: every slot draws a mask and mean colours, ``m = softmax_k`` and ``mu_k``; a pixel's likelihood is
      ``p(x) = sum_k m_k N(x; mu_k, sigma^2)``.
    - Refining, some rounds a frame: a network reads, for each slot, the frame, its colours and mask, the loss's gradients by
      these, the pixels' likelihoods with and without the slot, its share in them and the pixels' places, and beside all this
      the posterior's parameters, the gradients by them and the last draw; an LSTM then says the parameters anew.
    - Dynamics: ``u = h + core(h)``; d' is the first part of u, the mean and variance of z' are a perceptron's of u. That is
      the prior of the next frame, and the first guess of its posterior.

    The loss of a frame after each round and after the dynamics is ``-log p(x) + beta KL(posterior || prior)``; those after
    round i of n weigh i / n.

    Args:
        core: without memory, for tokens that are the slots themselves.
        decoder: of slots.
        frame_shape: ``(C, H, W)``.
        stride: of the refinement network's three convolutions; 1 in the code, where it costs most of the time.
        channels: of the first two.
    """

    def __init__(
        self,
        core: RecurrentCore,
        decoder: SlotDecoder,
        frame_shape: tuple[int, int, int],
        *,
        stride: int,
        channels: int,
    ):
        super().__init__()
        if core.capabilities.memory or not core.capabilities.transition:
            raise UserError(
                f"task.model=op3 needs a core without a state, such as core=op3, gnn or snps; {type(core).__name__} has one"
            )
        D = core.slot_size
        self.core: RecurrentCore
        self.core, self.decoder = core, decoder
        self.token_shape = core.num_slots, D
        half = D // 2
        self.first_state = nn.Parameter(torch.randn(half) / math.sqrt(half))
        self.first_posterior = nn.Parameter(torch.randn(2, half) / math.sqrt(half))
        self.prior = nn.Sequential(nn.Linear(D, D), nn.ELU(), nn.Linear(D, D))
        C, H, W = frame_shape
        self.places: Tensor
        self.register_buffer("places", pixel_places(H, W), persistent=False)
        layers: list[nn.Module] = []
        for before, after in ((3 * C + 8, channels), (channels, channels), (channels, half)):
            layers += [nn.Conv2d(before, after, 5, stride=stride, padding=2), nn.ELU()]
        self.look = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(half, 128), nn.ELU())
        self.lstm = nn.LSTMCell(128 + 5 * half, 128)
        self.posterior = nn.Linear(128, 2 * half)

    # The interface of models of frames, see ``VideoModel``.

    def initial_state(self, batch_size: int, num_slots: int | None = None) -> State:
        """Before the first frame: all slots the same but for what is drawn; any number of them."""
        K = self.core.num_slots if num_slots is None else num_slots
        mean, width = self.first_posterior.expand(batch_size, K, -1, -1).unbind(2)
        noise = torch.randn_like(mean)
        if not self.training:
            one = torch.randn(mean.shape[1:], generator=torch.Generator().manual_seed(0))
            noise = one.to(mean).expand_as(mean)
        return {
            "past": self.first_state.expand(batch_size, K, -1),
            "mean": mean,
            "width": width,
            "noise": noise,
            "prior_mean": torch.zeros_like(mean),
            "prior_width": torch.full_like(width, math.log(math.e - 1.0)),  # softplus of it is 1
            "rounds": torch.full((batch_size,), _FIRST_ROUNDS),
        }

    def observe(self, frames: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """The slots that say the frame after each of ``frames (T, B, C, H, W)``, ``(T, B, K, D)``, and the last state."""
        state = self.initial_state(frames.shape[1]) if state is None else state
        said = []
        for frame in frames:
            state = self._next(self._refined(frame, state)[0])
            said.append(_slots(state))
        return torch.stack(said), state

    def tokens(self, frames: Tensor) -> Tokens:
        """What the core reads: the slots of every one of ``frames (T, B, C, H, W)``, ``(T, B, K, D)``."""
        state = self.initial_state(frames.shape[1])
        found = []
        for frame in frames:
            state, _ = self._refined(frame, state)
            found.append(_slots(state))
            state = self._next(state)
        return Tokens(torch.stack(found))

    @torch.no_grad()
    def rollout(self, prompt: Tensor, steps: int, *, num_slots: int | None = None) -> tuple[Tensor, Tensor]:
        """Go on from true frames by the dynamics alone; see ``VideoModel.rollout``."""
        _, state = self.observe(prompt, self.initial_state(prompt.shape[1], num_slots))
        said, held = [], []
        for _ in range(steps):
            slots = _slots(state)
            masks, colours = self.decoder.parts(slots)
            said.append((masks[:, :, None] * colours).sum(1))
            held.append(slots)
            state = self._next(state)
        return torch.stack(said), torch.stack(held)

    # Training.

    def forward(self, frames: Tensor) -> dict[str, Tensor]:
        """The loss of ``frames (T, B, C, H, W)`` per pixel; of the last guess at the last one, nats and divergence."""
        state = self.initial_state(frames.shape[1])
        losses, weights = [], []
        for t, frame in enumerate(frames):
            if t:
                state = self._next(state)
            state, guesses = self._refined(frame, state)
            guesses.append(self._guess(frame, state))
            counted = range(1 if t == 0 else 0, len(guesses))  # the first guess at the first frame is nobody's
            weights += [i / (len(guesses) - 1) if i else 1.0 for i in counted]
            losses += [guesses[i].nats + _KL_WEIGHT * guesses[i].divergence for i in counted]
        weight = torch.tensor(weights, device=frames.device)
        pixels = frames.shape[-2] * frames.shape[-1]
        loss = (weight @ torch.stack(losses).mean(1)) / weight.sum() / pixels
        last = guesses[-1]
        return {"loss": loss, "nats": last.nats.mean().detach() / pixels, "kl": last.divergence.mean().detach()}

    # Parts.

    def _next(self, state: State) -> State:
        """The dynamics: the slots of the next frame before it is seen."""
        slots = _slots(state)
        change, _ = self.core(self.core.prepare(Tokens(slots)), self.core.initial_state(len(slots)))
        moved = slots + change
        mean, width = self.prior(moved).chunk(2, dim=-1)
        noise = torch.randn_like(mean) if self.training else torch.zeros_like(mean)
        told = {"mean": mean, "width": width, "prior_mean": mean, "prior_width": width, "noise": noise}
        return told | {"past": moved.chunk(2, dim=-1)[0], "rounds": torch.full_like(state["rounds"], _ROUNDS)}

    def _refined(self, frame: Tensor, state: State) -> "tuple[State, list[_Guess]]":
        """The state after some rounds on a frame ``(B, C, H, W)``, and the guess before each of them."""
        rounds = int(state["rounds"][0])
        trained = torch.is_grad_enabled()
        B, K = state["mean"].shape[:2]
        hidden = (frame.new_zeros(B * K, self.lstm.hidden_size),) * 2
        guesses = []
        for _ in range(rounds):
            with torch.enable_grad():  # a gradient is what is read, in evaluation as well
                if not trained or not state["mean"].requires_grad:
                    state = state | {name: state[name].detach().requires_grad_() for name in ("mean", "width")}
                guess = self._guess(frame, state)
                cost = guess.nats.sum() + _KL_WEIGHT * guess.divergence.sum()
                slopes = torch.autograd.grad(cost, [state["mean"], state["width"]], retain_graph=trained)
            guesses.append(guess)
            hidden = self.lstm(self._looked(frame, state, guess, slopes), hidden)
            mean, width = self.posterior(hidden[0]).unflatten(0, (B, K)).chunk(2, dim=-1)
            noise = torch.randn_like(mean) if self.training else torch.zeros_like(mean)
            state = state | {"mean": mean, "width": width, "noise": noise}
        return state, guesses

    def _guess(self, frame: Tensor, state: State) -> "_Guess":
        """What the slots say of a frame."""
        masks, colours = self.decoder.logits(_slots(state))
        log_masks, colours = torch.log_softmax(masks, dim=1), colours.sigmoid()
        errors = frame[:, None] - colours
        norm = colours.shape[2] * math.log(_STD * math.sqrt(2.0 * math.pi))
        log_each = -errors.square().sum(2, keepdim=True) / (2.0 * _STD**2) - norm  # (B, K, 1, H, W)
        log_all = (log_masks + log_each).logsumexp(1, keepdim=True)
        prior, posterior = _variance(state["prior_width"]), _variance(state["width"])
        apart = (state["mean"] - state["prior_mean"]).square() / prior
        divergence = 0.5 * (posterior / prior + apart - 1.0 + (prior / posterior).log())
        return _Guess(
            masks, log_masks, colours, errors, log_each, log_all, -log_all.flatten(1).sum(1), divergence.sum((1, 2))
        )

    def _looked(self, frame: Tensor, state: State, guess: "_Guess", slopes: tuple[Tensor, ...]) -> Tensor:
        """What the LSTM reads for each slot, ``(B K, features)``."""
        B, K = state["mean"].shape[:2]
        share = torch.softmax(guess.log_each, dim=1)
        with torch.no_grad():
            likelihood = guess.log_all.exp().expand_as(guess.log_each)
            taken = (guess.log_masks + guess.log_each - guess.log_all).exp()  # m_k p_k / p
            by_mask = -(guess.log_each - guess.log_all).exp()  # of the nats, by m_k
            by_colour = -taken * guess.errors / _STD**2  # and by mu_k
            unknown = (by_mask, likelihood, likelihood * (1.0 - taken), by_colour)
        normed = [F.layer_norm(part, part.shape[2:]).flatten(0, 1) for part in unknown]  # which may be of any size
        seen = frame[:, None].expand_as(guess.colours)
        known = [part.flatten(0, 1) for part in (seen, guess.colours, guess.log_masks.exp(), guess.masks, share)]
        picture = torch.cat([*known, *normed, self.places.expand(B * K, -1, -1, -1)], dim=1)
        vectors = [F.layer_norm(slope, slope.shape[2:]) for slope in slopes]
        vectors += [state["mean"], state["width"], _drawn(state)]
        return torch.cat([self.look(picture), *(part.flatten(0, 1) for part in vectors)], dim=1)


class _Guess(NamedTuple):
    """What slots say of a frame, each ``(B, K, ..., H, W)`` but the likelihood of all slots and what is summed."""

    masks: Tensor  # logits
    log_masks: Tensor
    colours: Tensor
    errors: Tensor
    log_each: Tensor
    log_all: Tensor
    nats: Tensor  # (B,)
    divergence: Tensor  # (B,)


def _variance(width: Tensor) -> Tensor:
    return F.softplus(width) + _SMALLEST_VARIANCE


def _drawn(state: State) -> Tensor:
    return state["mean"] + _variance(state["width"]).sqrt() * state["noise"]


def _slots(state: State) -> Tensor:
    return torch.cat([state["past"], _drawn(state)], dim=-1)


def op3_model(
    core: Callable[..., RecurrentCore],
    frame_shape: tuple[int, int, int],
    *,
    decoder: str,
    channels: int,
    hidden_size: int,
    slot_size: int,
) -> OP3:
    """OP3 around a core, which has five slots if it is not told otherwise.

    Args:
        core: makes the core in the sizes it is given.
        frame_shape: ``(C, H, W)``.
        decoder: "broadcast", the authors', with a refinement network that looks at every pixel, or "slots", R-NEM's, with one
            that halves the frame three times.
        channels: of the decoder, twice those of the refinement network; 64 for the authors'.
        hidden_size: of R-NEM's decoder.
        slot_size: D, even; half of it is drawn from the posterior.

    Raises:
        UserError: a decoder without masks, an odd size, or a core that is no dynamics of slots of this size.
    """
    if decoder == "joint":
        raise UserError("task.model=op3 infers a mask for each slot; give task.decoder=slots, or broadcast")
    if slot_size < 2 or slot_size % 2:
        raise UserError(
            f"task.slot_size={slot_size}; expected an even number, of which half is drawn from the posterior"
        )
    built = core(slot_size, num_tokens=5, num_slots=5, slot_size=slot_size)
    if built.slot_size != slot_size:
        raise UserError(
            f"core.slot_size={built.slot_size}; leave it out, for here slots are of task.slot_size={slot_size}"
        )
    broadcast = decoder == "broadcast"
    slots = SlotDecoder(built.slot_size, frame_shape, channels=channels, hidden_size=hidden_size, broadcast=broadcast)
    return OP3(built, slots, frame_shape, stride=1 if broadcast else 2, channels=max(1, channels // 2))
