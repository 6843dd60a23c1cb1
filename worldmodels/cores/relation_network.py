"""Relation networks: every pair of a sequence's tokens is looked at alone, and what is said of all pairs is added up.

Santoro et al. 2017, "A simple neural network module for relational reasoning", eq. 1, and Zhou et al. 2018, "Temporal
Relational Reasoning in Videos", eqs. 1 to 3; sizes, tags and first weights as Webb et al. 2021, "Emergent Symbols through
Binding in External Memory", appendix A.3.

Departures: of the temporal one, where Webb et al. say that sums over pairs and over triples each go through a layer of their
own before they are added, their code leaves these layers out; ours has them. Zhou et al. draw some of the triples at random;
Webb et al., and we, take all.
"""

import torch
from torch import Tensor, nn

from ..core import Tokens, at_least_one, elements


class _Tuples(nn.Module):
    """``sum_(i, j, ...) g(z_i, z_j, ...)`` over tuples of tokens; g is a perceptron with ReLU after both layers.

    The first layer is linear in each of a tuple's tokens, so it is applied to every token once for each place in a tuple.
    """

    def __init__(self, size: int, token_size: int, hidden_size: int, output_size: int):
        super().__init__()
        self.size = size
        self.hidden = nn.Linear(size * token_size, hidden_size)
        self.output = nn.Linear(hidden_size, output_size)

    def forward(self, z: Tensor, tuples: Tensor, mask: Tensor | None) -> Tensor:
        """Sums ``(B, output_size)`` over ``tuples (P, size)`` of the tokens ``z (B, L, F)`` that are there."""
        weights = self.hidden.weight.chunk(self.size, dim=1)
        total: Tensor = self.hidden.bias
        for weight, place in zip(weights, tuples.unbind(1), strict=True):
            total = total + (z @ weight.t())[:, place]
        said = torch.relu(self.output(torch.relu(total)))  # (B, P, output_size)
        if mask is not None:
            said = torch.where(mask[:, tuples].all(-1)[..., None], said, 0.0)
        return said.sum(1)


def tagged(z: Tensor) -> Tensor:
    """Tokens ``(B, L, F)`` with their place, 0 to L - 1, as one more feature."""
    place = torch.arange(z.shape[1], device=z.device, dtype=z.dtype)
    return torch.cat([z, place[:, None].expand(len(z), -1, 1)], dim=-1)


def _draw(module: nn.Module) -> None:
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)


class RelationNetwork(nn.Module):
    """``f(sum_ij g(z_i, z_j))`` over all ordered pairs of tokens, each with itself too (Santoro et al., eq. 1).

    Args:
        token_size: F; a token's place is added as one more feature.
        length: any; unused.
        hidden_size: of g's hidden layer.
        feature_size: of what g and f give out.
    """

    def __init__(self, token_size: int, length: int, *, hidden_size: int = 512, feature_size: int = 256):
        super().__init__()
        at_least_one(hidden_size=hidden_size, feature_size=feature_size)
        self.token_size = token_size
        self.feature_size = feature_size
        self.g = _Tuples(2, token_size + 1, hidden_size, feature_size)
        self.f = nn.Linear(feature_size, feature_size)
        _draw(self)

    def forward(self, tokens: Tokens) -> Tensor:
        """Features of whole sequences, ``(B, feature_size)``; see ``SequenceReader``."""
        z, mask = elements(tokens)
        places = torch.arange(z.shape[1], device=z.device)
        return torch.relu(self.f(self.g(tagged(z), torch.cartesian_prod(places, places), mask)))


class TemporalRelationNetwork(nn.Module):
    """``f(f_2(sum_i<j g_2(z_i, z_j)) + f_3(sum_i<j<k g_3(z_i, z_j, z_k)))``: pairs and triples in order (Zhou et al., eq. 3).

    Sequences of two tokens have no triples.

    Args:
        token_size: F; a token's place is added as one more feature.
        length: any; unused.
        hidden_size: of the hidden layers of g_2 and g_3.
        feature_size: of what g_2, g_3, f_2, f_3 and f give out.
    """

    def __init__(self, token_size: int, length: int, *, hidden_size: int = 512, feature_size: int = 256):
        super().__init__()
        at_least_one(hidden_size=hidden_size, feature_size=feature_size)
        self.token_size = token_size
        self.feature_size = feature_size
        self.g = nn.ModuleList(_Tuples(size, token_size + 1, hidden_size, feature_size) for size in (2, 3))
        self.f_each = nn.ModuleList(nn.Linear(feature_size, feature_size) for _ in (2, 3))
        self.f = nn.Linear(feature_size, feature_size)
        _draw(self)

    def forward(self, tokens: Tokens) -> Tensor:
        """Features of whole sequences, ``(B, feature_size)``; see ``SequenceReader``."""
        z, mask = elements(tokens)
        z = tagged(z)
        places = torch.arange(z.shape[1], device=z.device)
        total = z.new_zeros(())
        for size, g, f in zip((2, 3), self.g, self.f_each, strict=True):
            if len(places) >= size:
                total = total + torch.relu(f(g(z, torch.combinations(places, size), mask)))
        return torch.relu(self.f(total))
