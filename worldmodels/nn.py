"""The cores as layers: the arguments, shapes and results of ``nn.GRU``.

>>> from worldmodels.nn import SCOFF
>>> layer = SCOFF(8, 600, num_layers=2, batch_first=True)
>>> output, h_n = layer(torch.randn(4, 10, 8))
>>> output.shape, h_n.shape
(torch.Size([4, 10, 600]), torch.Size([2, 4, 600]))

``hidden_size`` is the width of the output, all slots side by side. ``h_n`` is ``(num_layers, B, S)`` with everything a
layer remembers side by side; S is ``hidden_size`` but for ESBN, NTM and MNM, whose memory comes on top
(``layer.state_size``). Layers
with LSTM cells (``cell="lstm"``) take and return ``(h, c)`` as ``nn.LSTM`` does. Where no ``hx`` is given, and in every row
of it that is all zeros, as programs for ``nn.GRU`` begin and reset, a layer starts from its core's initial state, which is
learned in most cores: slots that start alike would stay alike.

What else a core can be told, its number of slots first, is given by keyword: ``SCOFF(8, 600, num_slots=6, num_schemata=4)``.
Left out, ``num_slots`` is the divisor of ``hidden_size`` nearest to the layer's usual number (6 in SCOFF and RIMs, 4 in RMC,
5 in EntNet, 10 in S2GRU, 1 in the others), the smaller of two: ``SCOFF(8, 256)`` has 4 object files of 64.
"""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .core import State, Tokens, at_least_one, reset_where, unroll
from .cores.entnet import EntNet as EntNetCore
from .cores.esbn import ESBN as ESBNCore
from .cores.mnm import MNM as MNMCore
from .cores.ntm import NTM as NTMCore
from .cores.rims import RIMs as RIMsCore
from .cores.rmc import RMC as RMCCore
from .cores.s2rm import S2GRU as S2GRUCore
from .cores.scoff import SCOFF as SCOFFCore

__all__ = ["ESBN", "MNM", "NTM", "RMC", "S2GRU", "SCOFF", "EntNet", "RIMs"]


Hidden = Tensor | tuple[Tensor, Tensor]


def _divisor_near(number: int, of: int) -> int:
    """The divisor of a number that is nearest to another, the smaller of two."""
    divisors = [divisor for divisor in range(1, of + 1) if of % divisor == 0]
    return min(divisors, key=lambda divisor: abs(divisor - number))


class _Layer(nn.Module):
    """``num_layers`` cores one above the other, each reading the output of the one below as a single token.

    Args:
        input_size: features of an input.
        hidden_size: width of the output, a multiple of ``num_slots``.
        num_layers: layers one above the other.
        bias: must be True.
        batch_first: whether input and output are ``(B, T, .)``.
        dropout: of the output of all layers but the last, in training.
        bidirectional: must be False.
        device: of the parameters.
        dtype: of the parameters.
        num_slots: of the core; None for the divisor of ``hidden_size`` nearest to the layer's usual number.
        core_dropout: what the core itself calls ``dropout``, in cores that have one.
        options: all else the core can be told.
    """

    _core: ClassVar[Any]
    _num_slots: ClassVar[int]
    _options: ClassVar[dict[str, Any]] = {}

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: Any = None,
        dtype: Any = None,
        *,
        num_slots: int | None = None,
        core_dropout: float | None = None,
        **options: Any,
    ):
        super().__init__()
        name = type(self).__name__
        if bidirectional:
            raise ValueError(f"{name} has no bidirectional form; leave bidirectional=False")
        if not bias:
            raise ValueError(f"{name} has no form without biases; leave bias=True")
        for option in ("num_tokens", "position_size", "keys"):
            if option in options:
                raise ValueError(f"{name} as a layer reads one token without position or key; leave {option} out")
        at_least_one(hidden_size=hidden_size, num_layers=num_layers)
        if num_slots is None:
            num_slots = _divisor_near(self._num_slots, hidden_size)
        at_least_one(num_slots=num_slots)
        if hidden_size % num_slots:
            raise ValueError(
                f"hidden_size is {hidden_size}; it must be a multiple of num_slots={num_slots}: leave num_slots out, or set "
                f"it to {_divisor_near(num_slots, hidden_size)}"
            )
        self.input_size = input_size
        self.hidden_size = hidden_size
        self.num_layers = num_layers
        self.bias = bias
        self.batch_first = batch_first
        self.dropout = dropout
        self.bidirectional = bidirectional
        self.proj_size = 0
        self.drop = nn.Dropout(dropout)
        sizes = [input_size] + [hidden_size] * (num_layers - 1)
        options = self._options | options | ({} if core_dropout is None else {"dropout": core_dropout})
        self.cores = nn.ModuleList([self._core(size, num_slots, hidden_size // num_slots, **options) for size in sizes])
        self.to(device=device, dtype=dtype)
        states = self._first(1)
        self.pairs = set(states[0]) == {"hidden", "cell"}
        widths = [sum(leaf[0].numel() for leaf in state.values()) for state in states]
        self.state_size = max(widths) // (2 if self.pairs else 1)

    def _first(self, batch_size: int) -> list[State]:
        return [core.initial_state(batch_size) for core in self.cores]  # type: ignore[operator]

    def flatten_parameters(self) -> None:
        """Nothing to do; here because programs written for ``nn.GRU`` call it."""

    def extra_repr(self) -> str:
        """What ``nn.GRU`` shows."""
        return f"{self.input_size}, {self.hidden_size}, num_layers={self.num_layers}, batch_first={self.batch_first}"

    def _pack(self, states: list[State]) -> Hidden:
        """The states of all layers as ``h_n``."""
        if self.pairs:
            h, c = (torch.stack([state[name].flatten(1) for state in states]) for name in ("hidden", "cell"))
            return h, c
        dtype = next(self.parameters()).dtype
        rows = [
            torch.cat([leaf.reshape(len(leaf), -1).to(dtype) for leaf in state.values()], dim=1) for state in states
        ]
        return torch.stack([F.pad(row, (0, self.state_size - row.shape[1])) for row in rows])

    def _unpack(self, hx: Hidden, first: list[State]) -> list[State]:
        """The states that ``hx`` holds, leaf by leaf as in the initial states; a row of zeros is the initial state."""
        packed = torch.cat(list(hx), dim=-1) if isinstance(hx, tuple) else hx
        states: list[State] = []
        for vector, like in zip(packed, first, strict=True):
            names = ("hidden", "cell") if self.pairs else tuple(like)
            sizes = [like[name][0].numel() for name in names]
            parts = vector[:, : sum(sizes)].split(sizes, dim=1)
            given = {n: part.reshape(like[n].shape).to(like[n].dtype) for n, part in zip(names, parts, strict=True)}
            states.append(reset_where((vector == 0).all(-1), like, given))
        return states

    def forward(
        self, input: Tensor | nn.utils.rnn.PackedSequence, hx: Hidden | None = None, *, starts: Tensor | None = None
    ) -> tuple[Tensor, Hidden]:
        """Run the layers over a sequence.

        Args:
            input: ``(T, B, input_size)``; ``(B, T, input_size)`` with ``batch_first``; or ``(T, input_size)``.
            hx: ``(num_layers, B, S)``, or ``(num_layers, S)`` without a batch, or a pair of these with LSTM cells; None for
                the initial state, as are rows of zeros.
            starts: True where an episode begins, ``(T, B)``, with ``batch_first`` ``(B, T)``; the state is the initial
                one again before that step.

        Returns:
            The output, as wide as ``hidden_size``, and ``h_n``, as ``nn.GRU`` or ``nn.LSTM`` give them.

        Raises:
            TypeError: a packed sequence.
            ValueError: shapes that do not fit.
        """
        name = type(self).__name__
        if isinstance(input, nn.utils.rnn.PackedSequence):
            raise TypeError(f"{name} takes no packed sequences; pad them, and cut the output at their lengths")
        if input.dim() not in (2, 3) or input.shape[-1] != self.input_size:
            raise ValueError(
                f"{name} got input {tuple(input.shape)}; expected (T, B, {self.input_size}), or with batch_first=True "
                f"(B, T, {self.input_size})"
            )
        batched = input.dim() == 3
        if not batched:
            input = input[:, None]
            starts = None if starts is None else starts[:, None]
        elif self.batch_first:
            input = input.transpose(0, 1)
            starts = None if starts is None else starts.transpose(0, 1)
        T, B = input.shape[:2]
        if starts is not None and starts.shape != (T, B):
            raise ValueError(f"{name} got starts for {tuple(starts.shape)} steps and rows; the input has {(T, B)}")
        starts = None if starts is None else starts.bool()
        states = self._first(B)
        if hx is not None:
            parts = tuple(hx) if isinstance(hx, (tuple, list)) else (hx,)
            expected = (self.num_layers, B, self.state_size) if batched else (self.num_layers, self.state_size)
            if len(parts) != (2 if self.pairs else 1) or any(tuple(part.shape) != expected for part in parts):
                raise ValueError(
                    f"{name} got hx {[tuple(part.shape) for part in parts]}; expected "
                    f"{'a pair (h, c) of' if self.pairs else 'one of'} {expected}"
                )
            parts = parts if batched else tuple(part[:, None] for part in parts)
            states = self._unpack((parts[0], parts[1]) if self.pairs else parts[0], states)
        output, last = input, []
        for i, (core, state) in enumerate(zip(self.cores, states, strict=True)):
            if i:
                output = self.drop(output)
            slots, state = unroll(core, Tokens(output[:, :, None]), state, starts)  # type: ignore[arg-type]
            output = slots.flatten(2)
            last.append(state)
        h_n = self._pack(last)
        if not batched:
            return output[:, 0], (h_n[0][:, 0], h_n[1][:, 0]) if isinstance(h_n, tuple) else h_n[:, 0]
        return output.transpose(0, 1) if self.batch_first else output, h_n


class SCOFF(_Layer):
    """SCOFF as a layer: ``num_slots`` object files, see ``worldmodels.cores.scoff.SCOFF``.

    The paper promises a drop-in replacement with fewer recurrent parameters than a GRU of the same width.
    """

    _core = SCOFFCore
    _num_slots = 6


class RIMs(_Layer):
    """RIMs as a layer: ``num_slots`` modules, see ``worldmodels.cores.rims.RIMs``; with GRU cells unless told otherwise."""

    _core = RIMsCore
    _num_slots = 6
    _options: ClassVar[dict[str, Any]] = {"cell": "gru", "num_tokens": 1}


class RMC(_Layer):
    """The Relational Memory Core as a layer: ``num_slots`` rows of memory, see ``worldmodels.cores.rmc.RMC``."""

    _core = RMCCore
    _num_slots = 4
    _options: ClassVar[dict[str, Any]] = {"num_tokens": 1}


class EntNet(_Layer):
    """The Recurrent Entity Network as a layer: ``num_slots`` memories, see ``worldmodels.cores.entnet.EntNet``."""

    _core = EntNetCore
    _num_slots = 5
    _options: ClassVar[dict[str, Any]] = {"num_tokens": 1}


class ESBN(_Layer):
    """The Emergent Symbol Binding Network as a layer, see ``worldmodels.cores.esbn.ESBN``.

    ``hidden_size`` is the controller's. The state holds the memory too: hidden, cell, keys, values and the number of pairs
    written, ``S = 2 hidden_size + capacity (key_size + value_size) + 1``, the values as wide as the widest layer input.
    """

    _core = ESBNCore
    _num_slots = 1
    _options: ClassVar[dict[str, Any]] = {"num_tokens": 1}


class NTM(_Layer):
    """The Neural Turing Machine as a layer, see ``worldmodels.cores.ntm.NTM``; ``hidden_size`` is the controller's."""

    _core = NTMCore
    _num_slots = 1
    _options: ClassVar[dict[str, Any]] = {"num_tokens": 1}


class MNM(_Layer):
    """Metalearned Neural Memory as a layer, see ``worldmodels.cores.mnm.MNM``; ``hidden_size`` is the controller's.

    It learns from the loss of the program around it alone, without the objective of recall.
    """

    _core = MNMCore
    _num_slots = 1
    _options: ClassVar[dict[str, Any]] = {"num_tokens": 1}


class S2GRU(_Layer):
    """S2GRU as a layer: ``num_slots`` modules, see ``worldmodels.cores.s2rm.S2GRU``; the input has a learned place."""

    _core = S2GRUCore
    _num_slots = 10
    _options: ClassVar[dict[str, Any]] = {"num_tokens": 1}
