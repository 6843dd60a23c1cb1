"""PrediNet: heads that each pick two tokens of a sequence and compare them.

Shanahan et al. 2020, "An Explicitly Relational Neural Network Architecture", section 3; sizes, tags and first weights as Webb
et al. 2021, "Emergent Symbols through Binding in External Memory", appendix A.3. Departures: none.
"""

import torch
from torch import Tensor, nn

from ..attention import hide
from ..core import Tokens, at_least_one, elements
from .relation_network import tagged


class PrediNet(nn.Module):
    """Every head asks with two queries, made of the whole sequence, and subtracts what it is answered.

    For the tokens z_t with their place as one more feature, and each head:

    - ``Q_i = W_i [z_1, ..., z_L]`` for i = 1, 2; ``E_i = sum_t softmax_t(Q_i . W_k z_t) z_t``, keys shared by all heads;
    - ``D = W_s E_1 - W_s E_2``, with the places in E_1 and E_2 beside it.

    ``ReLU(W D + b)`` of the D of all heads side by side is given out.

    Args:
        token_size: F.
        length: L, how many tokens a sequence has.
        num_heads: heads.
        key_size: of keys and queries.
        num_relations: of a head, the length of D.
        feature_size: of what is given out.
    """

    def __init__(
        self,
        token_size: int,
        length: int,
        *,
        num_heads: int = 32,
        key_size: int = 16,
        num_relations: int = 16,
        feature_size: int = 8,
    ):
        super().__init__()
        at_least_one(num_heads=num_heads, key_size=key_size, num_relations=num_relations, feature_size=feature_size)
        self.token_size = token_size
        self.feature_size = feature_size
        self.length = length
        self.num_heads = num_heads
        size = token_size + 1
        self.key = nn.Linear(size, key_size, bias=False)
        # W_1 and W_2 are two layers, so that each is drawn by its own size.
        self.queries = nn.ModuleList(nn.Linear(length * size, num_heads * key_size, bias=False) for _ in range(2))
        self.relation = nn.Linear(size, num_relations, bias=False)
        self.output = nn.Linear(num_heads * (num_relations + 2), feature_size)
        for layer in (self.key, *self.queries, self.relation):
            nn.init.xavier_normal_(layer.weight)
        nn.init.kaiming_normal_(self.output.weight, nonlinearity="relu")
        nn.init.zeros_(self.output.bias)

    def forward(self, tokens: Tokens) -> Tensor:
        """Features of whole sequences, ``(B, feature_size)``; see ``SequenceReader``."""
        z, mask = elements(tokens)
        if z.shape[1] != self.length:
            raise ValueError(f"got sequences of {z.shape[1]} tokens; this PrediNet was built for {self.length}")
        z = tagged(z)
        weights = self._attend(z, mask)  # (B, 2, H, L)
        picked = weights @ z[:, None]  # (B, 2, H, F + 1)
        compared = self.relation(picked[:, 0] - picked[:, 1])
        return torch.relu(self.output(torch.cat([compared, picked[..., -1].movedim(1, -1)], dim=-1).flatten(1)))

    def _attend(self, z: Tensor, mask: Tensor | None) -> Tensor:
        """Where both queries of every head look, ``(B, 2, H, L)``."""
        queries = torch.stack([query(z.flatten(1)) for query in self.queries], 1).unflatten(-1, (self.num_heads, -1))
        logits = queries @ self.key(z)[:, None].transpose(-1, -2)
        return torch.softmax(logits if mask is None else hide(logits, mask), dim=-1)
