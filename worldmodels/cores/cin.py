"""The convolutional interaction network of RPIN: an interaction network on slots that are maps.

Qi et al. 2021, "Learning Long-term Visual Dynamics with Region Proposal Interaction Networks" (RPIN), section 3.2; one
convolution each, as the authors' ShapeStacks has it. The model around it is ``models/rpin.py``.
"""

import torch
from torch import Tensor, nn

from ..core import Capabilities, State, Tokens, present
from ..grouped import as_maps, map_channels


class CIN(nn.Module):
    """Each slot alone and with every other one, summed, and then together with what it was.

    ``e_i = f_A(f_O(x_i) + sum_{j != i} f_R([x_i, x_j]))``, ``z_i = f_Z([e_i, x_i])``, where every f is a 3 x 3 convolution
    with ReLU; the change is ``z_i - x_i``, so that what adds it has RPIN's z_i.

    The first ``slot_size`` features of a token are the slot x_i, a map; what is attached to it is seen at every place.

    Departure: f_R is a convolution of two maps side by side; ours is one of each, added before the ReLU, which is the same
    with K convolutions in place of K (K - 1).

    Args:
        token_size: F, slot and attached action.
        num_slots: K; any other number may be given later.
        slot_size: D, ``channels * map_size ** 2``.
        map_size: height and width of the maps; 7 in the paper. With 1 slots are vectors, and the network is Battaglia et
            al.'s (2016).
    """

    capabilities = Capabilities(memory=False)

    def __init__(self, token_size: int, num_slots: int, slot_size: int, *, map_size: int = 1):
        super().__init__()
        if token_size < slot_size:
            raise ValueError(f"token_size is {token_size}; a token begins with its slot, so give at least {slot_size}")
        self.token_size = token_size
        self.num_slots = num_slots
        self.slot_size = slot_size
        self.map_size = map_size
        C = map_channels(slot_size, map_size)
        seen = C + token_size - slot_size

        def convolution(channels: int, *, bias: bool = True) -> nn.Conv2d:
            # In a map of one place the eight weights around it would never be used.
            return (
                nn.Conv2d(channels, C, 3, padding=1, bias=bias)
                if map_size > 1
                else nn.Conv2d(channels, C, 1, bias=bias)
            )

        self.alone = convolution(seen)  # f_O
        self.first, self.second = convolution(seen), convolution(seen, bias=False)  # of f_R, a slot each
        self.affect = convolution(C)  # f_A
        self.aggregate = convolution(C + seen)  # f_Z

    def initial_state(self, batch_size: int, slots: Tensor | None = None) -> State:
        """The empty state: this core has no memory."""
        return {}

    def prepare(self, tokens: Tokens) -> Tokens:
        """The tokens hold the slots themselves; absent ones become zeros."""
        return tokens._replace(features=present(tokens))

    def forward(self, tokens: Tokens, state: State) -> tuple[Tensor, State]:
        """The change of every slot, ``(B, K, D)``, and the empty state."""
        B, K, _ = tokens.features.shape
        x = as_maps(tokens.features, self.slot_size, self.map_size).flatten(0, 1)  # (B K, C, M, M)
        first, second = self.first(x).unflatten(0, (B, K)), self.second(x).unflatten(0, (B, K))
        others = 1.0 - torch.eye(K, dtype=x.dtype, device=x.device).expand(B, K, K)
        if tokens.mask is not None:
            others = others * tokens.mask[:, None].to(x.dtype)
        pairs = torch.relu(first[:, :, None] + second[:, None]) * others[..., None, None, None]
        effect = torch.relu(self.affect(torch.relu(self.alone(x)) + pairs.sum(2).flatten(0, 1)))
        z = torch.relu(self.aggregate(torch.cat([effect, x], dim=1))).flatten(1).view(B, K, -1)
        return z - tokens.features[..., : self.slot_size], state

    def explain(self, tokens: Tokens, state: State) -> dict[str, Tensor]:
        """Nothing: every slot listens to all others."""
        return {}
