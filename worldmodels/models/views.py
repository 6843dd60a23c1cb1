"""World models that see only parts: views at known positions go in, what is seen at any position comes out.

Rahaman et al. 2020, "Spatially Structured Recurrent Modules". The paper's own model is ``SpatialModel``; what it puts around
LSTM, RMC and RIMs to compare with is ``AggregateModel``.

A sequence of views is read step by step. The slots after step t answer what will be seen at step t + 1.
"""

from collections.abc import Sequence
from typing import cast

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from ..attention import embed_position
from ..core import RecurrentCore, SpatialCore, State, Tokens, unroll
from ..data.views import Views
from ..decoders import ViewDecoder
from ..encoders import ViewEncoder, pixels
from ..errors import UserError


class ViewModel(nn.Module):
    """What both models share: encode the views that are there, run the core, decode the queries that are asked.

    Args:
        core: a core.
        encoder: views to vectors of the core's token size.
        decoder: what the core says to what is seen; None where nothing is asked.
        scale: positions are multiplied by this before they reach the model.
    """

    def __init__(self, core: RecurrentCore, encoder: ViewEncoder, decoder: ViewDecoder | None, scale: float):
        super().__init__()
        self.core: RecurrentCore
        self.encoder, self.core, self.decoder, self.scale = encoder, core, decoder, scale
        self.num_slots, self.slot_size = core.num_slots, core.slot_size
        self.has_memory = core.capabilities.memory

    def _encoded(self, views: Views) -> Tensor:
        """Vectors of the views ``(..., N, F)``, zeros for absent ones, which cost nothing."""
        there = views.mask.flatten().nonzero()[:, 0]
        lead = views.mask.dim()
        seen = views.observations.flatten(0, lead - 1)[there]
        seen = pixels(seen) if seen.dtype == torch.uint8 else seen
        if views.actions is not None:
            seen = torch.cat([seen, views.actions.flatten(0, lead - 1)[there]], dim=1)
        elif seen.shape[1] < self.encoder.view_shape[0]:  # what is done is not told
            seen = torch.cat(
                [seen, seen.new_zeros(len(seen), self.encoder.view_shape[0] - seen.shape[1], *seen.shape[2:])], dim=1
            )
        places = None
        if self.encoder.place_size:
            places = self._places(views.positions.flatten(0, lead - 1)[there])
        vectors = self.encoder(seen, places)
        whole = vectors.new_zeros(views.mask.numel(), self.encoder.size).index_copy(0, there, vectors)
        return whole.unflatten(0, views.mask.shape)

    def _places(self, positions: Tensor) -> Tensor:
        """P(x) of positions; see ``attention.embed_position``."""
        return embed_position(self.scale * positions, self.encoder.place_size)

    def tokens(self, views: Views) -> Tokens:
        """What the core reads of views."""
        raise NotImplementedError

    def query(
        self, slots: Float[Tensor, "*B K D"], positions: Float[Tensor, "*B Q P"], mask: Bool[Tensor, "*B Q"]
    ) -> Float[Tensor, "M C H W"]:
        """What is seen at positions, of those in the mask, in its order.

        Args:
            slots: from the core.
            positions: where.
            mask: which of them to answer.
        """
        raise NotImplementedError

    def observe(self, views: Views, state: State | None = None) -> tuple[Float[Tensor, "T B K D"], State]:
        """The core's slots after every step of views with leading axes ``(T, B)``, and the last state.

        Args:
            views: in order of time.
            state: the state before the first; None for a fresh one.
        """
        tokens = self.tokens(views)
        if state is None:
            state = self.core.initial_state(tokens.features.shape[1])
        if not self.has_memory:
            lead = tokens.features.shape[:2]
            flat = Tokens(
                tokens.features.flatten(0, 1), mask=None if tokens.mask is None else tokens.mask.flatten(0, 1)
            )
            return self.core(self.core.prepare(flat), state)[0].unflatten(0, lead), state
        return unroll(self.core, tokens, state)

    def forward(self, views: Views, positions: Tensor, mask: Tensor) -> Float[Tensor, "M C H W"]:
        """What each query position will show one step after the views, see ``query``.

        Args:
            views: leading axes ``(T, B)``.
            positions: of the next step, ``(T, B, Q, P)``.
            mask: which of them to answer, ``(T, B, Q)``.
        """
        return self.query(self.observe(views)[0], positions, mask)

    @torch.no_grad()
    def rollout(self, prompt: Views, positions: Tensor, asked: Tensor) -> Float[Tensor, "S B Q C H W"]:
        """Imagine (appendix F.1.1): after the prompt the model sees what it said itself, thresholded at 0.5.

        Args:
            prompt: views that are seen, ``(T, B)``.
            positions: where it looks at each imagined step, ``(S, B, N, P)``.
            asked: where it is asked at each imagined step, ``(S, B, Q, P)``.

        Returns:
            Probabilities of the pixels at ``asked``.
        """
        slots, state = self.observe(prompt)
        latest, said = slots[-1], []
        everything = torch.ones(positions.shape[1:-1], dtype=torch.bool, device=positions.device)
        whole = torch.ones(asked.shape[1:-1], dtype=torch.bool, device=asked.device)
        for looks, asks in zip(positions, asked, strict=True):
            said.append(self.query(latest, asks, whole).sigmoid().unflatten(0, whole.shape))
            guess = (self.query(latest, looks, everything) > 0.0).float().unflatten(0, everything.shape)
            slots, state = self.observe(Views(guess[None], looks[None], everything[None]), state)
            latest = slots[-1]
        return torch.stack(said)


class SpatialModel(ViewModel):
    """S2RM (section 4): a token for every view, at its position; queries poll the modules near to them (eq. 10).

    Departure, where encoder and decoder have places: the paper tells an S2RM where a view is by the kernel alone,
    ``E(O)`` and ``D(d)``, and its baselines by ``E(O, s)`` and ``D(h, s)``. With M modules that is M numbers for each view;
    given the places as well, an S2RM learns to follow balls in fewer steps.

    Args:
        core: S2GRU or S2RMC, built with ``position_size``.
        encoder: in the paper without places.
        decoder: in the paper without places.
        scale: see ``ViewModel``.
    """

    def tokens(self, views: Views) -> Tokens:
        """A token a view."""
        return Tokens(self._encoded(views), self.scale * _zero_where_absent(views.positions, views.mask), views.mask)

    def query(self, slots: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """``O = D(d)``, ``d = sum_m Z(P(x), p_m) h_m``."""
        answers = cast(SpatialCore, self.core).answer(slots, self.scale * _zero_where_absent(positions, mask))
        assert self.decoder is not None
        places = self._places(positions[mask]) if self.decoder.place_size else None
        return self.decoder(answers[mask], places)


def _zero_where_absent(positions: Tensor, mask: Tensor) -> Tensor:
    """Positions ``(..., N, P)``, those of absent views, which may be anything, as zeros."""
    return torch.where(mask[..., None], positions, 0.0)


class AggregateModel(ViewModel):
    """The paper's scaffold for any core (appendix D): encodings are added, queries decode all slots at once.

    ``r_t = sum_a E(O_a, s_a)`` (eq. 29), ``h_{t+1} = F(r_t, h_t)`` (eq. 30), ``O_q = D(h_{t+1}, s_q)`` (eq. 31). With a
    core without memory and the views of the step that is asked for, this is the time-travelling oracle.

    Args:
        core: any core; r is its only token.
        encoder: with places.
        decoder: with places.
        scale: see ``ViewModel``.
    """

    def tokens(self, views: Views) -> Tokens:
        """One token, the sum over the views."""
        return Tokens(self._encoded(views).sum(-2, keepdim=True))

    def query(self, slots: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """``O = D(h, s)``."""
        index = torch.arange(mask[..., 0].numel(), device=mask.device).reshape(*mask.shape[:-1], 1).expand_as(mask)
        assert self.decoder is not None
        return self.decoder(slots.flatten(-2).flatten(0, -2), self._places(positions[mask]), index[mask])


class ViewWorldModel(nn.Module):
    """A world model in the space of the modules: the slots after views, and how they change before the next ones.

    ``z_t`` are the core's slots after it has read the views of steps 0 to t, without what is done in them;
    ``z'_{t+1}`` are the slots when the core then takes a step without views, in which it is told what is done, if anything,
    at the places where it was last seen.

    Args:
        reader: the model that reads views; its decoder is not used.
    """

    def __init__(self, reader: ViewModel):
        super().__init__()
        self.reader = reader

    @property
    def core(self) -> RecurrentCore:
        """The reader's core."""
        return self.reader.core

    def observe(self, views: Views) -> tuple[Float[Tensor, "T B K D"], list[State]]:
        """The slots and the states after every step of views ``(T, B)``."""
        core = self.reader.core
        tokens = core.prepare(self.reader.tokens(views._replace(actions=None)))
        state = core.initial_state(tokens.features.shape[1])
        slots, states = [], []
        for tokens_t in tokens.steps():
            slots_t, state = core(tokens_t, state)
            slots.append(slots_t)
            states.append(state)
        return torch.stack(slots), states

    def imagine(self, state: State, doing: Views) -> tuple[Float[Tensor, "B K D"], State]:
        """One step without views.

        Args:
            state: after the last views, ``(B, ...)``.
            doing: views ``(B, N, ...)`` of which only places and actions count.
        """
        nothing = torch.zeros_like(doing.observations)
        mask = doing.mask if doing.actions is not None else torch.zeros_like(doing.mask)
        core = self.reader.core
        return core(core.prepare(self.reader.tokens(doing._replace(observations=nothing, mask=mask))), state)

    def rollout(self, state: State, doing: Sequence[Views]) -> Float[Tensor, "S B K D"]:
        """Several steps without views, one for each entry of ``doing``."""
        imagined = []
        for views in doing:
            slots, state = self.imagine(state, views)
            imagined.append(slots)
        return torch.stack(imagined)

    def forward(self, views: Views) -> tuple[Float[Tensor, "T B K D"], Float[Tensor, "L B K D"]]:
        """What training needs: the slots after each of T steps of views, and for the last T - 1 what was imagined before."""
        slots, states = self.observe(views)
        T, B = views.mask.shape[:2]
        before = {name: torch.cat([state[name] for state in states[:-1]]) for name in states[0]}
        doing = views.at(slice(0, T - 1))
        actions = None if doing.actions is None else doing.actions.flatten(0, 1)
        flat = Views(doing.observations.flatten(0, 1), doing.positions.flatten(0, 1), doing.mask.flatten(0, 1), actions)
        return slots, self.imagine(before, flat)[0].unflatten(0, (T - 1, B))


def view_model(
    core: RecurrentCore,
    seen_shape: tuple[int, int, int],
    said_channels: int | None,
    *,
    channels: int,
    polar: bool,
    place_size: int,
    scale: float,
    placed: bool = False,
) -> ViewModel:
    """The model around a core: ``SpatialModel`` for those that know where, ``AggregateModel`` for all others.

    Args:
        core: built for tokens of the encoder's size.
        seen_shape: ``(C, H, W)`` of a view, actions included.
        said_channels: channels of what is said about a view; None for a model that says nothing.
        channels: of the convolutions, see ``ViewEncoder``.
        polar: whether views are polar images.
        place_size: d of the places that encoder and decoder are given.
        scale: see ``ViewModel``.
        placed: give the encoder and decoder around an S2RM core the places as well, see ``SpatialModel``.

    Raises:
        UserError: an S2RM core that was built without positions, a core without a state of several slots.
    """

    def decoder(size: int, places: int) -> ViewDecoder | None:
        if said_channels is None:
            return None
        said_shape = (said_channels, *seen_shape[1:])
        return ViewDecoder(size, said_shape, channels=channels, place_size=places, polar=polar)

    if core.capabilities.places:
        if cast(SpatialCore, core).position_size is None:
            raise UserError("views have positions; leave core.position_size out, or set it to 2")
        places = place_size if placed else 0
        encoder = ViewEncoder(seen_shape, core.token_size, channels=channels, place_size=places, polar=polar)
        return SpatialModel(core, encoder, decoder(core.slot_size, places), scale)
    if not core.capabilities.memory and core.num_slots > 1:
        raise UserError(
            f"{type(core).__name__} has no state and changes {core.num_slots} slots, but the scaffold has one token, the sum "
            "over views; set core.num_slots=1, or choose another core, such as core=s2gru or core=gru"
        )
    encoder = ViewEncoder(seen_shape, core.token_size, channels=channels, place_size=place_size, polar=polar)
    return AggregateModel(core, encoder, decoder(core.num_slots * core.slot_size, place_size), scale)
