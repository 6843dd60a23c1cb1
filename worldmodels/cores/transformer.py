"""The transformer as a reader of whole sequences, as ESBN's authors compare with it.

Vaswani et al. 2017, "Attention Is All You Need", sections 3.1 to 3.5; sizes and first weights as Webb et al. 2021, "Emergent
Symbols through Binding in External Memory", appendix A.3. Departures: none.
"""

import math

import torch
from torch import Tensor, nn

from ..core import Tokens, at_least_one, elements


class Transformer(nn.Module):
    """``ReLU(W mean_t LayerNorm(encoder(z_t + PE(t))) + b)``, the encoder torch's own (``nn.TransformerEncoder``).

    ``PE(t)_2i = sin(t / 10000^(2i / F))``, ``PE(t)_2i+1 = cos(t / 10000^(2i / F))`` (section 3.5), t counting tokens. Absent
    tokens are attended to by none, and are not in the mean.

    Args:
        token_size: F, even and a multiple of ``num_heads``.
        length: any; unused.
        num_layers: of the encoder.
        num_heads: of its attention.
        mlp_size: of its feed-forward layers.
        feature_size: of what is given out.
    """

    def __init__(
        self,
        token_size: int,
        length: int,
        *,
        num_layers: int = 1,
        num_heads: int = 8,
        mlp_size: int = 512,
        feature_size: int = 256,
    ):
        super().__init__()
        at_least_one(num_layers=num_layers, num_heads=num_heads, mlp_size=mlp_size, feature_size=feature_size)
        if token_size % 2 or token_size % num_heads:
            raise ValueError(
                f"a token has {token_size} features; expected an even number, a multiple of {num_heads} heads"
            )
        self.token_size = token_size
        self.feature_size = feature_size
        layer = nn.TransformerEncoderLayer(token_size, num_heads, mlp_size, dropout=0.0, batch_first=True)
        norm = nn.LayerNorm(token_size)
        self.encoder = nn.TransformerEncoder(layer, num_layers, norm=norm, enable_nested_tensor=False)
        self.output = nn.Linear(token_size, feature_size)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif "self_attn" in name:
                nn.init.xavier_normal_(parameter)
            elif "linear" in name or name.startswith("output"):
                nn.init.kaiming_normal_(parameter, nonlinearity="relu")

    def forward(self, tokens: Tokens) -> Tensor:
        """Features of whole sequences, ``(B, feature_size)``; see ``SequenceReader``."""
        z, mask = elements(tokens)
        read = self.encoder(z + _places(z), src_key_padding_mask=None if mask is None else ~mask)
        if mask is None:
            mean = read.mean(1)
        else:
            shares = mask / mask.sum(1, keepdim=True).clamp_min(1)
            mean = torch.where(mask[..., None], read, 0.0).mul(shares[..., None]).sum(1)
        return torch.relu(self.output(mean))


def _places(z: Tensor) -> Tensor:
    """Sines and cosines that tell the places of ``z (B, L, F)`` apart, ``(L, F)``."""
    L, F = z.shape[1:]
    rates = torch.exp(torch.arange(0, F, 2, device=z.device) * (-math.log(10_000.0) / F))
    angles = torch.arange(L, device=z.device)[:, None] * rates
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1).to(z.dtype)
