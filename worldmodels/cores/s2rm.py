"""S2RM: recurrent modules with places on a sphere, that see, hear and answer only what is near to them.

Rahaman et al. 2020, "Spatially Structured Recurrent Modules", section 4 and appendices C and E.

Departures, most of them choices where the paper contradicts itself:
- Positions (eq. 3 and 25): with the exponents as printed, 10000^i or 1000^i with i = 0, 2, 4 ..., all but the first
  frequency are constant on any picture; we use those of the work it cites (Vaswani et al. 2017), ``10000^(-2 j n / d)``.
- Softmax (eq. 7, 17 and 22): the paper normalises over all tokens or modules and multiplies by the kernel afterwards, so that
  one out of reach still takes weight from those within; we normalise within reach, so that what is out of reach has no
  influence at all, as the text wants.
  The gradient through the truncated kernel (appendix E.4.1) therefore reaches the local term alone.
- Equation 8 multiplies the local weights with y^j, the queries' own values; appendix C has the keys' (z^j), as we do.
- Equation 15 makes queries from observations and keys from modules; the text says the reverse, as do we: modules ask.
- Heads (tables 2 and 3): two heads of 128 give 256 values, but the gate compares them with vectors of 128; a linear layer
  brings them to the size of a module.
- Encodings have the modules' size in the paper; where tokens do not, a linear layer comes first.
- Local terms (eq. 8 and 24) are sums over all that is in reach. Between modules such a sum is several times as long as a
  state, and where more than about three modules hear each other the states double from step to step. We divide by the sum
  of the kernel's weights where that is above 1; ``normalise=False`` gives the sums as printed.
- The paper scales no dot product by 1 / sqrt(d); nor do we.
- First places of the modules: not given. Random points of the sphere would reach nothing; ours are the places of random
  positions or, where tokens have none, lie around a common point, the place of token i beside that of module i.
"""

import copy
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attention import embed_position, join_heads, over_heads, spherical_kernel, split_heads
from ..core import Capabilities, State, Tokens, at_least_one, present
from ..grouped import GroupedGRUCell, GroupedLinear
from .rmc import RelationalMemory, identity_rows


class KernelModulatedAttention(nn.Module):
    """Kernel-modulated dot-product attention: dot products within the reach of a kernel (eq. 6 to 9, appendix C).

    ``W_ij = Z(a_i, b_j)``, ``Wbar_ij = softmax_j(Theta_q y_i . Theta_k z_j)``, ``ybar_i = sum_j Wbar_ij W_ij Theta_v z_j``,
    ``ytilde_i = sum_j W_ij z_j``, ``yhat_i = G ytilde_i + (1 - G) ybar_i``, G a two-layer perceptron with a sigmoid on both.

    Args:
        size: of queries, tokens and results.
        num_heads: of the dot products.
        key_size: of each head.
        value_size: of each head.
        normalise: divide the local term by the sum of its weights where that is above 1.
    """

    def __init__(self, size: int, num_heads: int, key_size: int, value_size: int, normalise: bool):
        super().__init__()
        self.normalise = normalise
        self.num_heads = num_heads
        self.sizes = [num_heads * key_size, num_heads * value_size]
        self.query = nn.Linear(size, num_heads * key_size, bias=False)
        self.key_value = nn.Linear(size, sum(self.sizes), bias=False)
        self.output = nn.Linear(num_heads * value_size, size, bias=False)
        self.gate = nn.Sequential(nn.Linear(2 * size, size), nn.ReLU(), nn.Linear(size, 1), nn.Sigmoid())

    def prepare(self, tokens: Tensor) -> Tensor:
        """Tokens, their keys and their values side by side, ``(..., N, size + .)``."""
        return torch.cat([tokens, self.key_value(tokens)], dim=-1)

    def forward(self, y: Tensor, prepared: Tensor, kernel: Tensor) -> tuple[Tensor, Tensor]:
        """What each query gets, and from where.

        Args:
            y: queries ``(B, M, size)``.
            prepared: from ``prepare``, ``(B, N, .)``.
            kernel: Z, ``(B, M, N)`` or ``(M, N)``, 0 where out of reach.

        Returns:
            ``(B, M, size)``, and the weights ``(B, H, M, N)``.
        """
        z, keys, values = prepared.split([y.shape[-1], *self.sizes], dim=-1)
        local = kernel @ z
        if self.normalise:
            local = local / kernel.sum(-1, keepdim=True).clamp_min(1.0)
        kernel = kernel.expand(len(y), -1, -1)[:, None]  # (B, 1, M, N)
        logits = split_heads(self.query(y), self.num_heads) @ split_heads(keys, self.num_heads).transpose(-1, -2)
        logits = logits.masked_fill(kernel == 0, torch.finfo(logits.dtype).min)
        weights = torch.softmax(logits, dim=-1) * kernel
        attended = self.output(join_heads(weights @ split_heads(values, self.num_heads)))
        gate = self.gate(torch.cat([attended, local], dim=-1))
        return torch.lerp(attended, local, gate), weights


class _S2RM(nn.Module):
    """What S2GRU and S2RMC share: places, attention to the input, attention between modules, answers at positions."""

    def __init__(
        self,
        token_size: int,
        num_slots: int,
        slot_size: int,
        num_tokens: int | None,
        position_size: int | None,
        extent: float,
        place_size: int,
        bandwidth: float,
        truncation: float,
        input_heads: int,
        cell_heads: int,
        key_size: int,
        normalise: bool,
    ):
        super().__init__()
        at_least_one(slot_size=slot_size, place_size=place_size, input_heads=input_heads)
        at_least_one(cell_heads=cell_heads, key_size=key_size)
        if position_size is not None and place_size % (2 * position_size):
            raise ValueError(
                f"place_size is {place_size}; it must be a multiple of 2 x position_size = {2 * position_size}"
            )
        if bandwidth <= 0 or not -1.0 <= truncation < 1.0:
            raise ValueError(
                f"bandwidth is {bandwidth} and truncation {truncation}; expected > 0 and -1 <= truncation < 1"
            )
        self.token_size = token_size
        self.num_slots = num_slots
        self.slot_size = slot_size
        self.position_size = position_size
        self.bandwidth = bandwidth
        self.truncation = truncation
        if position_size is None:
            cosine = max(0.5 * (1.0 + truncation), 0.05)  # between two places, on average: most are within reach
            spread = ((1.0 / cosine - 1.0) / place_size) ** 0.5
            around = F.normalize(torch.randn(place_size), dim=-1)
            places = F.normalize(around + spread * torch.randn(num_slots, place_size), dim=-1)
            index = torch.arange(num_slots if num_tokens is None else num_tokens)
            self.token_places = nn.Parameter(
                places[index % num_slots] + 0.1 * spread * torch.randn(len(index), place_size)
            )
        else:
            places = embed_position(extent * torch.rand(num_slots, position_size), place_size)
        self.places = nn.Parameter(places)  # p_m before they are normed
        self.embed = nn.Linear(token_size, slot_size) if token_size != slot_size else nn.Identity()
        self.input_attention = KernelModulatedAttention(slot_size, input_heads, key_size, slot_size, normalise)
        self.cell_attention = KernelModulatedAttention(slot_size, cell_heads, key_size, slot_size, normalise)

    def reach(self, places: Tensor) -> Tensor:
        """Z between the modules and places on the sphere (eq. 5): ``(..., M, N)`` for ``(..., N, place_size)``."""
        p = F.normalize(self.places, dim=-1)
        return spherical_kernel(p, places, bandwidth=self.bandwidth, truncation=self.truncation)

    def prepare(self, tokens: Tokens) -> Tokens:
        """Encodings, keys and values of the tokens; as positions the kernel between modules and tokens ``(..., N, M)``."""
        features = self.input_attention.prepare(self.embed(present(tokens)))
        if self.position_size is None:
            places = F.normalize(self.token_places[: features.shape[-2]], dim=-1)
        elif tokens.positions is None:
            raise ValueError(
                "this core was built with position_size and needs Tokens.positions (..., N, position_size)"
            )
        else:
            positions = present(Tokens(tokens.positions, mask=tokens.mask))  # or NaN there would reach the gradients
            places = embed_position(positions, self.places.shape[-1])
        kernel = self.reach(places).transpose(-1, -2).expand(*features.shape[:-1], self.num_slots)
        if tokens.mask is not None:
            kernel = torch.where(tokens.mask[..., None], kernel, 0.0)
        return tokens._replace(features=features, positions=kernel)

    def _hear(self, tokens: Tokens, hidden: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """The modules' inputs u (eq. 19), aggregated hidden states (eq. 24), and both attentions."""
        assert tokens.positions is not None  # from prepare
        kernel = tokens.positions.transpose(-1, -2)
        inputs, reads = self.input_attention(hidden, tokens.features, kernel)
        own = self.reach(F.normalize(self.places, dim=-1))
        heard, listens = self.cell_attention(hidden, self.cell_attention.prepare(hidden), own)
        return inputs, heard, {"input_attention": reads, "communication": listens}

    def answer(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Output attention: what the modules near a position say there, ``d_q = sum_m Z(s_q, p_m) h_m`` (eq. 10).

        Args:
            slots: the modules' states ``(..., M, D)``.
            positions: ``(..., Q, position_size)``; without ``position_size``, places on the sphere ``(..., Q, place_size)``.

        Returns:
            ``(..., Q, D)``.
        """
        size = self.places.shape[-1]
        places = F.normalize(positions, dim=-1) if self.position_size is None else embed_position(positions, size)
        return self.reach(places).transpose(-1, -2) @ slots

    def keep(self, modules: Sequence[int]) -> "_S2RM":
        """A copy with only these modules, in this order: what is left when the others are taken away.

        Args:
            modules: indices of those to keep.
        """
        index = torch.as_tensor(list(modules), device=self.places.device)
        if len(index) == 0 or int(index.min()) < 0 or int(index.max()) >= self.num_slots:
            raise ValueError(f"modules are {list(modules)}; expected some of 0 to {self.num_slots - 1}")
        core = copy.deepcopy(self)
        core.num_slots = len(index)
        for owner in core.modules():
            if owner is core or isinstance(owner, (GroupedLinear, RelationalMemory)):
                for name, parameter in owner.named_parameters(recurse=False):
                    if name == "token_places":
                        continue
                    axis = 1 if name in ("norm_weight", "norm_bias") else 0
                    setattr(owner, name, nn.Parameter(parameter.detach().index_select(axis, index)))
        return core


class S2GRU(_S2RM):
    """S2RM with a GRU in each module: ``h_m' = GRU_m(u_m, hbar_m)`` (eq. 4).

    u is what the input attention gives (eq. 19), hbar what the modules hear from each other (eq. 24).

    Args:
        token_size: F.
        num_slots: M, the number of modules; 10 in the paper.
        slot_size: D of each; 128 in the paper.
        num_tokens: N, without positions; None for as many as modules.
        position_size: n, if tokens have positions; None to learn a place for each token index.
        extent: first places are those of positions drawn from 0 to ``extent``.
        place_size: d of the sphere; 16 (balls) and 8 (StarCraft II) in the paper.
        bandwidth: epsilon of the kernel; 1 in the paper.
        truncation: tau of the kernel; 0.6 and 0.5 in the paper. -1 lets everything reach everything.
        input_heads: of the input attention; 2 in the paper.
        cell_heads: of the attention between modules; 4 in the paper.
        key_size: of each head; 16 in the paper.
        normalise: see the departures above.
    """

    capabilities = Capabilities(starts_from_slots=True, places=True)

    def __init__(
        self,
        token_size: int,
        num_slots: int,
        slot_size: int,
        *,
        num_tokens: int | None = None,
        position_size: int | None = None,
        extent: float = 1.0,
        place_size: int = 16,
        bandwidth: float = 1.0,
        truncation: float = 0.6,
        input_heads: int = 2,
        cell_heads: int = 4,
        key_size: int = 16,
        normalise: bool = True,
    ):
        super().__init__(
            token_size,
            num_slots,
            slot_size,
            num_tokens,
            position_size,
            extent,
            place_size,
            bandwidth,
            truncation,
            input_heads,
            cell_heads,
            key_size,
            normalise,
        )
        self.cell = GroupedGRUCell(num_slots, slot_size, slot_size)
        self.first = nn.Parameter(0.1 * torch.randn(num_slots, slot_size))

    def initial_state(self, batch_size: int, slots: Tensor | None = None) -> State:
        """Learned first states, one for each module; given slots are the state."""
        return {"hidden": self.first.expand(batch_size, -1, -1) if slots is None else slots}

    def forward(self, tokens: Tokens, state: State) -> tuple[Tensor, State]:
        """One step: the modules' hidden states, ``(B, M, D)``, and the next state."""
        inputs, heard, _ = self._hear(tokens, state["hidden"])
        hidden = self.cell(inputs, heard)
        return hidden, {"hidden": hidden}

    def explain(self, tokens: Tokens, state: State) -> dict[str, Tensor]:
        """Attention times kernel: "input_attention" ``(B, M, N)`` and "communication" ``(B, M, M)``, means over heads."""
        return over_heads(self._hear(tokens, state["hidden"])[2])


class S2RMC(_S2RM):
    """S2RM with a relational memory in each module (appendix E.3).

    A module's memory M is projected to a message h, the messages are exchanged as in S2GRU, and what is heard is a row of
    the module's input beside u: ``[M; x]`` of the RMC becomes ``[M; u, hbar]``. The slots are the messages.

    Args:
        token_size: F.
        num_slots: number of modules; 10 in the paper.
        slot_size: D of the messages; 128 in the paper.
        num_tokens: N, without positions; None for as many as modules.
        position_size: n, if tokens have positions; None to learn a place for each token index.
        extent: first places are those of positions drawn from 0 to ``extent``.
        place_size: d of the sphere.
        bandwidth: epsilon of the kernel.
        truncation: tau of the kernel.
        input_heads: of the input attention.
        cell_heads: of the attention between modules.
        key_size: of each head of both.
        normalise: see the departures above.
        memory_rows: of a module's memory; 4 in the paper.
        memory_heads: of its attention; 4 in the paper.
        memory_size: of a row; None for 64 a head, as in the paper.
    """

    capabilities = Capabilities(places=True)

    def __init__(
        self,
        token_size: int,
        num_slots: int,
        slot_size: int,
        *,
        num_tokens: int | None = None,
        position_size: int | None = None,
        extent: float = 1.0,
        place_size: int = 16,
        bandwidth: float = 1.0,
        truncation: float = 0.6,
        input_heads: int = 2,
        cell_heads: int = 4,
        key_size: int = 16,
        normalise: bool = True,
        memory_rows: int = 4,
        memory_heads: int = 4,
        memory_size: int | None = None,
    ):
        super().__init__(
            token_size,
            num_slots,
            slot_size,
            num_tokens,
            position_size,
            extent,
            place_size,
            bandwidth,
            truncation,
            input_heads,
            cell_heads,
            key_size,
            normalise,
        )
        memory_size = 64 * memory_heads if memory_size is None else memory_size
        self.memory_rows = memory_rows
        self.memory_size = memory_size
        self.relational = RelationalMemory(num_slots, slot_size, 2, memory_size, num_heads=memory_heads)
        self.message = GroupedLinear(num_slots, memory_rows * memory_size, slot_size)

    def initial_state(self, batch_size: int, slots: Tensor | None = None) -> State:
        """Rows of the identity in every module; encoded slots cannot be the state, which is rows of memory."""
        rows = identity_rows(self.memory_rows, self.memory_size, self.places)[:, None]
        return {"memory": rows.expand(batch_size, -1, self.num_slots, -1)}

    def _messages(self, memory: Tensor) -> Tensor:
        return self.message(memory.transpose(1, 2).flatten(-2))

    def forward(self, tokens: Tokens, state: State) -> tuple[Tensor, State]:
        """One step: the modules' messages, ``(B, M, D)``, and the next state."""
        inputs, heard, _ = self._hear(tokens, self._messages(state["memory"]))
        qkv, gates = self.relational.prepare(torch.stack([inputs, heard], dim=1))
        memory, _ = self.relational(state["memory"], qkv, gates, None)
        return self._messages(memory), {"memory": memory}

    def explain(self, tokens: Tokens, state: State) -> dict[str, Tensor]:
        """Attention times kernel: "input_attention" ``(B, M, N)`` and "communication" ``(B, M, M)``, means over heads."""
        return over_heads(self._hear(tokens, self._messages(state["memory"]))[2])
