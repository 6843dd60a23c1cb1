"""SCOFF: object files hold the state of objects, schemata hold how objects change, and each file picks its schema.

Goyal et al. 2020, "Factorizing Declarative and Procedural Knowledge in Structured, Dynamical Environments", Algorithm 1.
SCOFF++ and communication by rules: Goyal et al. 2021, "Neural Production Systems", section 4.2, Table 4 and appendix E.2.

Departures:
- Step 2. The paper lets the object files compete for each position, a softmax over files; the authors' code lets the
  positions and a null compete for each file; ``compete`` offers both, the paper's by default.
- Step 3. The paper has one key matrix for all schemata, the authors' code one for each (``schema_keys="each"``). The authors'
  code feeds each schema the inputs of all object files side by side, which leaks from file to file; ours see their own.
  Its LSTM schemata are mixed by a soft choice; ours are chosen, as in the paper. It keeps the Gumbel noise at evaluation;
  we choose by argmax there.
- Step 4. The paper adds what is heard; the authors' code gates it first (``gated=True``). The paper's pseudo-code (appendix
  G) makes queries, keys and values of the chosen schema's own; Algorithm 1 and the code do not, nor do we.
- First states are in neither; ours are learned, one for each object file, with LSTM schemata's cells in agreement. Gates may
  begin by holding for long (``chrono``), so that with few active files each keeps its kind of token from the start.
- The authors' code also runs a two-layer network over the state at every step, which no paper mentions; we leave it out.
- SCOFF++ is described in a sentence, "replace the input attention by an iterative one as in slot attention", its query "a
  function of the hidden state from the previous time step". Ours starts slot attention from a linear map of the object
  files, and its slots are what the schema reads.
"""

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attention import (
    Communication,
    SlotAttention,
    hard_choice,
    join_heads,
    most,
    over_heads,
    over_slots,
    scores,
    split_heads,
    with_null,
)
from ..core import Capabilities, State, Tokens, above_zero, at_least_one, present
from ..grouped import gru_update, lstm_update
from .nps import PNPS, SNPS
from .rules import Rules

COMPETE = ("objects", "tokens", "iterative")
COMMUNICATION = ("attention", "snps", "pnps", "rules", "none")


class SCOFF(nn.Module):
    """n_f object files of the same weights; each reads the tokens, picks one of n_s schemata, and hears from the others.

    - Step 2: ``q_k = W^q h_k``, ``s_kp = softmax_k(q_k . kappa_p / sqrt(d_e))``, ``z_k = sum_p s_kp v_p``.
    - Step 3: ``h~_kj = GRU_j(z_k, h_k)``, ``i_k = argmax_j(q~_k . kappa~_kj + gamma)`` with ``q~_k = h_k W~^q`` and
      ``kappa~_kj = h~_kj W~^e``, ``h_k <- h~_{k, i_k}``; the choice is hard, its gradient straight-through.
    - Step 4: ``h_k <- h_k + sum_k' s_kk' v_k'``, ``s_kk' = softmax_k'(q_k . kappa_k' / sqrt(d_e))``, with queries from the
      state before the step and keys and values from the new one.

    Step 1, the encoder, is outside. No weight belongs to an object file, only its learned first state, so exchanging
    files exchanges what comes out; and any other number of files may be run after training from given slots.

    Args:
        token_size: F.
        num_slots: n_f, the number of object files.
        slot_size: D of each.
        num_schemata: n_s.
        cell: what a schema is, "gru" or "lstm".
        compete: step 2: "objects", the files compete for each token (Algorithm 1); "tokens", the tokens and a null token
            compete for each file (the authors' code); "iterative", slot attention (SCOFF++).
        num_active: top-k: only so many files, those that attend most to the input, are updated; None for all. The others are
            still heard: they are keys and values of step 4, and contexts of rules, but no rule is spent on them.
        chrono: T_max of chrono initialisation: a unit begins by holding its state for a time of 1 to T_max steps, drawn for
            each, so that a file stays who it is from its first update on, and with top-k the same tokens stay its own. None
            for gates as ``nn.LSTM`` and ``nn.GRU`` begin with them.
        num_heads: of step 2.
        key_size: of step 2; 64 in the paper.
        value_size: of each head of step 2; None for ``slot_size``.
        num_iterations: rounds of slot attention with ``compete="iterative"``.
        schema_key_size: of step 3; 16 in the authors' code.
        schema_keys: "shared" by the schemata, or a matrix for "each".
        temperature: of the straight-through gradient of step 3; 0.5 in the authors' code.
        communication: step 4: "attention", "snps" or "pnps" (as NPS's Table 4 compares them), "rules" whose conditions see
            the pair (``cores/rules.py``, in no paper), or "none".
        comm_heads: heads of step 4; 4 in the paper.
        comm_key_size: of each of its heads; 32 in the paper.
        comm_value_size: of each of its heads; 32 in the paper.
        gated: whether what is heard passes a gate.
        num_rules: of "snps", "pnps" and "rules".
        num_stages: rule applications a step, of "snps", "pnps" and "rules".
        rule_size: of a rule's embedding, of "snps" and "pnps".
        rule_key_size: of the queries and keys that choose rules, primaries and contexts.
        rule_hidden_size: of a rule's MLP.
        rule_temperature: of the straight-through gradient of these choices; 1 in NPS's paper.
        dropout: of what is read and heard, in training; 0.1 in the paper's experiments.
    """

    capabilities = Capabilities(starts_from_slots=True)

    def __init__(
        self,
        token_size: int,
        num_slots: int,
        slot_size: int,
        *,
        num_schemata: int = 4,
        cell: str = "gru",
        compete: str = "objects",
        num_active: int | None = None,
        chrono: int | None = None,
        num_heads: int = 1,
        key_size: int = 64,
        value_size: int | None = None,
        num_iterations: int = 3,
        schema_key_size: int = 16,
        schema_keys: str = "shared",
        temperature: float = 1.0,
        communication: str = "attention",
        comm_heads: int = 4,
        comm_key_size: int = 32,
        comm_value_size: int = 32,
        gated: bool = False,
        num_rules: int = 4,
        num_stages: int = 1,
        rule_size: int = 64,
        rule_key_size: int = 32,
        rule_hidden_size: int = 128,
        rule_temperature: float = 1.0,
        dropout: float = 0.0,
    ):
        super().__init__()
        for name, value, known in (
            ("cell", cell, ("gru", "lstm")),
            ("compete", compete, COMPETE),
            ("schema_keys", schema_keys, ("shared", "each")),
            ("communication", communication, COMMUNICATION),
        ):
            if value not in known:
                raise ValueError(f"{name} is {value!r}; expected one of {', '.join(known)}")
        at_least_one(slot_size=slot_size, num_schemata=num_schemata, schema_key_size=schema_key_size)
        at_least_one(num_heads=num_heads, key_size=key_size, num_iterations=num_iterations)
        at_least_one(comm_heads=comm_heads, comm_key_size=comm_key_size, comm_value_size=comm_value_size)
        at_least_one(rule_size=rule_size, rule_key_size=rule_key_size, rule_hidden_size=rule_hidden_size)
        if chrono is not None and chrono < 2:
            raise ValueError(f"chrono is {chrono}; expected at least 2, the longest time to hold a state for, in steps")
        above_zero(temperature=temperature, rule_temperature=rule_temperature)
        if num_active is not None and not 1 <= num_active <= num_slots:
            raise ValueError(
                f"num_active is {num_active}; expected 1 to {num_slots}, the number of object files (num_slots)"
            )
        self.token_size = token_size
        self.num_slots = num_slots
        self.slot_size = slot_size
        self.num_active = num_active if num_active != num_slots else None
        self.compete = compete
        self.num_heads = num_heads
        self.num_schemata = num_schemata
        self.temperature = temperature
        self.lstm = cell == "lstm"
        if compete == "iterative":
            read_size = slot_size
            self.input_attention = SlotAttention(token_size, slot_size, num_iterations=num_iterations)
            self.query = nn.Linear(slot_size, slot_size)
        else:
            value_size = slot_size if value_size is None else value_size
            at_least_one(value_size=value_size)
            read_size = num_heads * value_size
            self.sizes = [num_heads * key_size, read_size]
            self.key_value = nn.Linear(token_size, sum(self.sizes), bias=False)  # W^e and W^v
            self.query = nn.Linear(slot_size, num_heads * key_size, bias=False)  # W^q
        gates = 4 if self.lstm else 3
        bound = 1.0 / math.sqrt(slot_size)
        self.schema_input = nn.Linear(read_size, num_schemata * gates * slot_size)
        self.schema_recurrent = nn.Linear(slot_size, num_schemata * gates * slot_size, bias=not self.lstm)
        for parameter in (*self.schema_input.parameters(), *self.schema_recurrent.parameters()):
            nn.init.uniform_(parameter, -bound, bound)
        if chrono is not None:
            self._begin_holding(chrono)
        self.chooses = num_schemata > 1  # with a single schema there is nothing to choose
        if self.chooses:
            self.schema_query = nn.Linear(slot_size, schema_key_size, bias=False)  # W~^q
            keys = (num_schemata, slot_size, schema_key_size) if schema_keys == "each" else (slot_size, schema_key_size)
            self.schema_key = nn.Parameter(torch.empty(keys).uniform_(-bound, bound))  # W~^e
        self.communication: Communication | SNPS | PNPS | Rules | None = None
        if communication == "attention":
            linear = partial(nn.Linear, bias=False)
            self.communication = Communication(
                slot_size, comm_heads, comm_key_size, comm_value_size, gated=gated, linear=linear
            )
        elif communication == "rules":
            self.communication = Rules(
                slot_size,
                num_slots,
                slot_size,
                num_rules=num_rules,
                num_stages=num_stages,
                hidden_size=rule_hidden_size,
                temperature=rule_temperature,
            )
        elif communication != "none":
            rules = SNPS if communication == "snps" else PNPS
            self.communication = rules(
                slot_size,
                num_slots,
                slot_size,
                num_rules=num_rules,
                num_stages=num_stages,
                rule_size=rule_size,
                key_size=rule_key_size,
                hidden_size=rule_hidden_size,
                temperature=rule_temperature,
            )
        self.dropout = nn.Dropout(dropout)
        self.first_hidden = nn.Parameter(0.2 * torch.randn(num_slots, slot_size))  # where tanh is nearly linear

    def _begin_holding(self, chrono: int) -> None:
        """Biases of the gates from the times to hold a state for (Tallec & Ollivier 2018, equation 16)."""
        bias = self.schema_input.bias.detach().unflatten(0, (self.num_schemata, -1, self.slot_size))
        hold = torch.rand_like(bias[:, 0]).mul(chrono - 2).add(1.0).log()  # log U(1, T_max - 1)
        bias[:, 1] = hold  # of an LSTM's forget gate, of a GRU's update gate
        if self.lstm:
            bias[:, 0] = -hold

    def initial_state(self, batch_size: int, slots: Tensor | None = None) -> State:
        """Learned first states, one for each object file, or they would stay equal for ever; given slots are the state.

        An LSTM's cell begins in agreement with what it gives out, ``h_k = tanh(c_k)``; from a cell of zeros, the first
        update would wipe out what tells a file from the others.
        """
        cell = self.first_hidden.expand(batch_size, -1, -1) if slots is None else slots
        hidden = torch.tanh(cell) if slots is None else slots
        return {"hidden": hidden, "cell": cell} if self.lstm else {"hidden": hidden}

    def prepare(self, tokens: Tokens) -> Tokens:
        """Values of the tokens as features, ``(..., N, values)``, and their keys as positions, ``(..., N, keys)``."""
        if self.compete == "iterative":
            return tokens._replace(features=self.input_attention.prepare(present(tokens)))
        keys, values = self.key_value(present(tokens)).split(self.sizes, dim=-1)
        return Tokens(values, keys, tokens.mask)

    def forward(self, tokens: Tokens, state: State) -> tuple[Tensor, State]:
        """One step: the object files, ``(B, K, D)``, and the next state."""
        slots, state, _ = self._run(tokens, state)
        return slots, state

    def _run(self, tokens: Tokens, state: State) -> tuple[Tensor, State, dict[str, Tensor]]:
        hidden = state["hidden"]
        read, attention = self._read(tokens, hidden)
        files, cell, schema = self._apply_schemata(self.dropout(read), state)
        explained = {"schema": schema, "input_attention": attention}
        speaking = files
        if self.num_active is not None:
            active = most(attention.sum((1, 3)), self.num_active)
            updates = active[..., None]
            files = torch.where(updates, files, hidden)
            speaking = torch.where(updates, files, hidden.detach())
            explained["active"] = active
        if isinstance(self.communication, Communication):
            heard, explained["communication"] = self.communication(hidden, speaking)
        elif self.communication is not None:
            heard, chosen = self.communication.run(Tokens(speaking), explained.get("active"))
            explained |= chosen
        if self.communication is not None:
            files = files + self.dropout(heard)
        if self.num_active is not None:
            files = torch.where(updates, files, hidden)
            cell = None if cell is None else torch.where(updates, cell, state["cell"])
        return files, {"hidden": files} | ({} if cell is None else {"cell": cell}), explained

    def _read(self, tokens: Tokens, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Step 2: what each object file reads, ``(B, K, .)``, and its attention ``(B, H, K, N)``."""
        if self.compete == "iterative":
            read, attention = self.input_attention(tokens.features, self.query(hidden), tokens.mask)
            return read, attention[:, None]
        assert tokens.positions is not None  # from prepare
        keys, values = (split_heads(x, self.num_heads) for x in (tokens.positions, tokens.features))
        logits = scores(split_heads(self.query(hidden), self.num_heads), keys)
        weights = over_slots(logits, tokens.mask) if self.compete == "objects" else with_null(logits, tokens.mask)
        return join_heads(weights @ values), weights

    def _apply_schemata(self, read: Tensor, state: State) -> tuple[Tensor, Tensor | None, Tensor]:
        """Step 3: the new object files, their cells (with LSTM schemata) and the schema ``(B, K)`` each has picked."""
        hidden = state["hidden"]
        inputs = self.schema_input(read).unflatten(-1, (self.num_schemata, -1))  # (B, K, n_s, gates D)
        recurrent = self.schema_recurrent(hidden).unflatten(-1, (self.num_schemata, -1))
        cells = None
        if self.lstm:
            candidates, cells = lstm_update(
                inputs + recurrent, state["cell"][..., None, :].expand(inputs.shape[:3] + (-1,))
            )
        else:
            candidates = gru_update(inputs, recurrent, hidden[..., None, :])
        if not self.chooses:
            only = torch.zeros_like(hidden[..., 0], dtype=torch.long)
            return candidates[..., 0, :], None if cells is None else cells[..., 0, :], only
        query = self.schema_query(hidden)
        if self.schema_key.dim() == 2:  # q . (h~ W) = (W q) . h~, which needs no key of every candidate
            logits = (candidates @ F.linear(query, self.schema_key)[..., None])[..., 0]
        else:
            logits = torch.einsum("bknd,nde,bke->bkn", candidates, self.schema_key, query)
        choice = hard_choice(logits, noise=self.training, temperature=self.temperature)[..., None, :]  # (B, K, 1, n_s)
        cell = None if cells is None else (choice @ cells)[..., 0, :]
        return (choice @ candidates)[..., 0, :], cell, choice[..., 0, :].argmax(-1)

    def explain(self, tokens: Tokens, state: State) -> dict[str, Tensor]:
        """The "schema" of each object file ``(B, K)``, its "input_attention" ``(B, K, N)``, and what else it chooses.

        With ``num_active``, which files are "active" ``(B, K)``; with attention, "communication" ``(B, K, K)``; with rules
        what NPS explains: "rule", "primary" and "context".
        """
        return over_heads(self._run(tokens, state)[2])
