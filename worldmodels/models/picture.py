"""A picture changed by a rule: NPS's MNIST transformations (Goyal et al. 2021, section 4.1 and appendix C)."""

import torch
from torch import Tensor, nn

from ..core import RecurrentCore, Tokens
from ..decoders import DoublingConv2d

_HALVINGS = 3
PICTURE, OPERATION = 0, 1  # the two slots


class PictureChange(nn.Module):
    """A picture and an operation, each a slot; a rule makes of the picture what it is after the operation (Table 8).

    Step 2 matches the operation to a rule, step 3 selects the picture, step 4 applies "the MLP of the selected rule to the
    selected slot from step 3", and the result is decoded. So a rule must not see the operation, or one rule could do for
    all: the operation is attached to its slot, which itself is zero, where choices see it and rules do not
    (``rules_see="slot"``). What the rule adds to that slot is the picture's vector after the operation.

    Convolutions keep sizes that halve and double exactly: of 4 x 4 with stride 2 one pixel around. The paper's last layer
    ends in ReLU and is trained by binary cross-entropy, which cannot be; ours gives logits.

    Args:
        core: a core that applies rules, of two slots of D, for tokens of D and ``D`` more.
        size: pixels on a side, a multiple of 8.
        num_operations: N.
    """

    def __init__(self, core: RecurrentCore, size: int, num_operations: int):
        super().__init__()
        self.core: RecurrentCore
        self.core = core
        map_size, slot_size = size // 2**_HALVINGS, core.slot_size
        self.encoder = nn.Sequential(
            *(nn.Conv2d(1, 16, 4, 2, 1), nn.ELU(), nn.Conv2d(16, 32, 4, 2, 1), nn.ELU()),
            *(nn.Conv2d(32, 64, 4, 2, 1), nn.ELU(), nn.Flatten(), nn.Linear(64 * map_size**2, slot_size), nn.ELU()),
        )
        self.operation = nn.Embedding(num_operations, slot_size)
        # Operations begin almost alike, so that at first noise tries every rule for each. With larger vectors each has a rule
        # by chance from the start, often two the same one, and the rule that is left over is never learned.
        nn.init.normal_(self.operation.weight, std=0.1)
        self.decoder = nn.Sequential(
            *(nn.Linear(slot_size, 64 * map_size**2), nn.ReLU(), nn.Unflatten(1, (64, map_size, map_size))),
            *(DoublingConv2d(64, 32), nn.ReLU(), DoublingConv2d(32, 16), nn.ReLU()),
            *(nn.Upsample(scale_factor=2), nn.Conv2d(16, 1, 3, 1, 1)),
        )

    def tokens(self, frames: Tensor, operation: Tensor) -> Tokens:
        """The two slots and what is attached to them, ``(B, 2, 2 D)``."""
        pair = torch.stack([self.encoder(frames), self.operation(operation)], dim=1)
        empty = torch.zeros_like(pair[:, 0])
        attached = torch.stack([empty, pair[:, OPERATION]], dim=1)
        return Tokens(torch.cat([torch.stack([pair[:, PICTURE], empty], dim=1), attached], dim=-1))

    def forward(self, frames: Tensor, operation: Tensor) -> Tensor:
        """Logits of the frames ``(B, 1, S, S)`` after operations ``(B,)`` on ``frames``."""
        tokens = self.tokens(frames, operation)
        change, _ = self.core(self.core.prepare(tokens), self.core.initial_state(len(frames)))
        logits: Tensor = self.decoder(change[:, OPERATION])
        return logits
