"""C-SWM's transition: a graph network over all ordered pairs of slots.

Kipf, van der Pol & Welling 2020, "Contrastive Learning of Structured World Models", section 2.2, equations 3 and 4.
"""

import torch
from torch import Tensor, nn

from ..core import Capabilities, State, Tokens, present


class GNN(nn.Module):
    """Messages between all pairs of slots, summed, and an update of each slot.

    ``e_ij = f_edge([z_i, z_j])`` (eq. 3), ``delta_i = f_node([z_i, a_i, sum_{j != i} e_ij])`` (eq. 4), with f_edge and
    f_node two hidden layers each, LayerNorm after the second linear layer.

    The first ``slot_size`` features of a token are the slot z_i, the rest is the action a_i attached to it.

    The same function with fewer operations: the first edge layer is a sum of one matmul per slot for the receiving and
    one for the sending side, and the last edge layer, being linear, is applied to the sum of the messages instead of to
    every message, folded into the node layer that follows it.

    Departure: in the paper an edge sees the two slots but no action, so a slot cannot know that its neighbour is being
    moved, and a push cannot be predicted. ``edge_actions=True`` lets the edge see the tokens, action and all.

    Args:
        token_size: F, slot and attached action.
        num_slots: K.
        slot_size: D, at most F.
        hidden_size: width of both networks; 512 in the paper.
        edge_actions: whether edges see the attached actions.
    """

    capabilities = Capabilities(memory=False)

    def __init__(
        self, token_size: int, num_slots: int, slot_size: int, *, hidden_size: int = 512, edge_actions: bool = False
    ):
        super().__init__()
        if token_size < slot_size:
            raise ValueError(
                f"token_size is {token_size}; a GNN token begins with its slot, so give at least {slot_size}"
            )
        self.token_size = token_size
        self.num_slots = num_slots
        self.slot_size = slot_size
        self.edge_size = token_size if edge_actions else slot_size
        self.edge_in = nn.Linear(2 * self.edge_size, hidden_size)
        self.edge_hidden = nn.Linear(hidden_size, hidden_size)
        self.edge_norm = nn.LayerNorm(hidden_size)
        self.edge_out = nn.Linear(hidden_size, hidden_size)
        self.node_in = nn.Linear(token_size + hidden_size, hidden_size)
        self.node_hidden = nn.Linear(hidden_size, hidden_size)
        self.node_norm = nn.LayerNorm(hidden_size)
        self.node_out = nn.Linear(hidden_size, slot_size)

    def initial_state(self, batch_size: int, slots: Tensor | None = None) -> State:
        """The empty state: this core has no memory."""
        return {}

    def prepare(self, tokens: Tokens) -> Tokens:
        """The tokens hold the slots themselves; absent ones become zeros."""
        return tokens._replace(features=present(tokens))

    def forward(self, tokens: Tokens, state: State) -> tuple[Tensor, State]:
        """The change of every slot, ``(B, K, D)``, and the empty state."""
        features = tokens.features
        B, K, F = features.shape
        node = nn.functional.linear(features, self.node_in.weight[:, :F], self.node_in.bias)
        if K > 1:
            node = node + self._messages(features, tokens.mask)
        hidden = self.node_norm(self.node_hidden(node.relu_())).relu_()
        return self.node_out(hidden), state

    def _messages(self, features: Tensor, mask: Tensor | None) -> Tensor:
        """What the sum of the messages adds to the first node layer, ``(B, K, hidden)``."""
        B, K, F = features.shape
        ends = features[..., : self.edge_size]
        to_weight, from_weight = self.edge_in.weight.split(self.edge_size, dim=1)
        receiving = nn.functional.linear(ends, to_weight, self.edge_in.bias)
        sending = nn.functional.linear(ends, from_weight)
        pairs = self._incidence(K, features) @ torch.cat([receiving, sending], dim=1)  # (B, K (K - 1), hidden)
        messages = self.edge_norm(self.edge_hidden(pairs.relu_())).relu_().unflatten(1, (K, K - 1))
        count: Tensor | int = K - 1
        if mask is not None:
            others = self._incidence(K, features)[:, K:].argmax(1).view(K, K - 1)
            there = mask[:, others].to(messages.dtype)
            messages = messages * there[..., None]
            count = there.sum(-1, keepdim=True)
        weight = self.node_in.weight[:, F:]
        folded = nn.functional.linear(messages.sum(2), weight @ self.edge_out.weight)
        return folded + count * (weight @ self.edge_out.bias)

    @staticmethod
    def _incidence(K: int, like: Tensor) -> Tensor:
        """``(K (K - 1), 2 K)``: row (i, j), j != i, picks the receiving side of slot i and the sending side of slot j.

        One small matmul forms all pairs; gathering them would cost a scatter in the backward pass.
        """
        same = torch.eye(K, dtype=like.dtype, device=like.device)
        pairs = torch.cat([same[:, None].expand(K, K, K), same.expand(K, K, K)], dim=-1).flatten(0, 1)
        off_diagonal = torch.arange(K * K, device=like.device).reshape(-1)[1:].view(K - 1, K + 1)[:, :-1].flatten()
        return pairs[off_diagonal]

    def explain(self, tokens: Tokens, state: State) -> dict[str, Tensor]:
        """Nothing: every slot listens to all others."""
        return {}
