"""OP3's dynamics: each entity on its own, and what every other one does to it, weighted and summed.

Veerapaneni et al. 2019, "Entity Abstraction in Visual Model-Based Reinforcement Learning", section 3.2 and appendix; sizes as
in the authors' code. The inference around it is ``models/op3.py``.

Departure: the paper's network says the next state itself. Like all our cores without memory, ours says how each slot
changes, so that another may stand in its place.
"""

import torch
from torch import Tensor, nn

from ..core import Capabilities, State, Tokens, at_least_one, present


class OP3(nn.Module):
    """Each slot alone, the action on it, the effects of all pairs, and the two together.

    The first ``slot_size`` features of a token are the slot h_k, the rest is the action a_k attached to it:

    - ``s_k = d_o(h_k)``; with actions, ``s_k <- d_a([s_k, e(a_k)]) s(w_a([s_k, e(a_k)]))``;
    - ``u_kj = d_p([s_k, s_j])``, ``effect_k = sum_{j != k} s(w_p(u_kj)) d_e(u_kj)``;
    - ``delta_k = d_c([s_k, effect_k])``.

    Every d, e and w is a perceptron of one hidden layer with ELU; s is the logistic function.

    Args:
        token_size: F, slot and attached action.
        num_slots: K.
        slot_size: D, at most F; the width of all networks, twice that of pairs.
        effect_size: of the effect of a pair and of an encoded action.
    """

    capabilities = Capabilities(memory=False)

    def __init__(self, token_size: int, num_slots: int, slot_size: int, *, effect_size: int = 32):
        super().__init__()
        at_least_one(slot_size=slot_size, effect_size=effect_size)
        if token_size < slot_size:
            raise ValueError(f"token_size is {token_size}; a token begins with its slot, so give at least {slot_size}")
        self.token_size = token_size
        self.num_slots = num_slots
        self.slot_size = slot_size
        D, action_size = slot_size, token_size - slot_size
        self.alone = _perceptron(D, D, D)
        self.action: nn.Module | None = None
        if action_size:
            self.action = _perceptron(action_size, D, effect_size)
            self.acted = _perceptron(D + effect_size, D, D)
            self.acts = _perceptron(D + effect_size, D, 1, last=nn.Sigmoid())
        self.first, self.second = (
            nn.Linear(D, 2 * D),
            nn.Linear(D, 2 * D, bias=False),
        )  # of d_p's first layer, a slot each
        self.pair = nn.Sequential(nn.ELU(), nn.Linear(2 * D, D), nn.ELU())
        self.effect = _perceptron(D, D, effect_size)
        self.attention = _perceptron(D, D, 1, last=nn.Sigmoid())
        self.output = nn.Sequential(nn.Linear(D + effect_size, D), nn.ELU(), nn.Linear(D, D))

    def initial_state(self, batch_size: int, slots: Tensor | None = None) -> State:
        """The empty state: this core has no memory."""
        return {}

    def prepare(self, tokens: Tokens) -> Tokens:
        """The tokens hold the slots themselves; absent ones become zeros."""
        return tokens._replace(features=present(tokens))

    def forward(self, tokens: Tokens, state: State) -> tuple[Tensor, State]:
        """The change of every slot, ``(B, K, D)``, and the empty state."""
        s, u = self._pairs(tokens)
        weights = self.attention(u) * self._others(tokens, u)
        return self.output(torch.cat([s, (weights * self.effect(u)).sum(2)], dim=-1)), state

    def _pairs(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """Every slot alone, ``(B, K, D)``, and every slot with every other, ``(B, K, K, D)``."""
        slots, actions = tokens.features.split([self.slot_size, self.token_size - self.slot_size], dim=-1)
        s = self.alone(slots)
        if self.action is not None:
            both = torch.cat([s, self.action(actions)], dim=-1)
            s = self.acted(both) * self.acts(both)
        return s, self.pair(self.first(s)[:, :, None] + self.second(s)[:, None])

    @staticmethod
    def _others(tokens: Tokens, u: Tensor) -> Tensor:
        """1 for slots that are others and are there, ``(1 or B, K, K, 1)``."""
        K = u.shape[1]
        others = 1.0 - torch.eye(K, dtype=u.dtype, device=u.device)[None, ..., None]
        return others if tokens.mask is None else others * tokens.mask[:, None, :, None].to(u.dtype)

    def explain(self, tokens: Tokens, state: State) -> dict[str, Tensor]:
        """How much slot k lets slot j do to it, 0 to 1: "communication" ``(B, K, K)``."""
        _, u = self._pairs(tokens)
        return {"communication": (self.attention(u) * self._others(tokens, u))[..., 0]}


def _perceptron(size: int, hidden_size: int, output_size: int, *, last: nn.Module | None = None) -> nn.Sequential:
    """One hidden layer; ELU after both, or another function after the last."""
    return nn.Sequential(nn.Linear(size, hidden_size), nn.ELU(), nn.Linear(hidden_size, output_size), last or nn.ELU())
