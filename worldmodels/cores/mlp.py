"""The baseline without structure and without memory: one perceptron for all slots at once."""

from torch import Tensor, nn

from ..core import Capabilities, State, Tokens, present


class MLP(nn.Module):
    """``delta = f([token_1, ..., token_N])``: two hidden layers, LayerNorm after the second, as the GNN's networks.

    Args:
        token_size: F.
        num_slots: K.
        slot_size: D.
        hidden_size: width.
        num_tokens: N; None for as many as slots.
    """

    capabilities = Capabilities(memory=False)

    def __init__(
        self, token_size: int, num_slots: int, slot_size: int, *, hidden_size: int = 512, num_tokens: int | None = None
    ):
        super().__init__()
        self.token_size = token_size
        self.num_slots = num_slots
        self.slot_size = slot_size
        self.network = nn.Sequential(
            nn.Linear((num_tokens or num_slots) * token_size, hidden_size),
            nn.ReLU(),
            nn.Linear(hidden_size, hidden_size),
            nn.LayerNorm(hidden_size),
            nn.ReLU(),
            nn.Linear(hidden_size, num_slots * slot_size),
        )

    def initial_state(self, batch_size: int, slots: Tensor | None = None) -> State:
        """The empty state: this core has no memory."""
        return {}

    def prepare(self, tokens: Tokens) -> Tokens:
        """Absent tokens become zeros."""
        return tokens._replace(features=present(tokens))

    def forward(self, tokens: Tokens, state: State) -> tuple[Tensor, State]:
        """The change of every slot, ``(B, K, D)``, and the empty state."""
        return self.network(tokens.features.flatten(1)).unflatten(1, (self.num_slots, self.slot_size)), state

    def explain(self, tokens: Tokens, state: State) -> dict[str, Tensor]:
        """Nothing: it chooses nothing."""
        return {}
