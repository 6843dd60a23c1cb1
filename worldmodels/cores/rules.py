"""Rules whose conditions see the pair of slots they would be applied to: NPS with conditions as strong as its actions.

After Goyal et al. 2021, "Neural Production Systems" (``cores/nps.py`` is the paper's own form). A rule is a perceptron that
looks at two slots, the primary and its context; of what it finds it says how well it fits (its condition), and how it would
change the primary (its action). Of all rules on all pairs the best is applied, one after another, or one to every slot.

Departures from NPS:
- The paper chooses the primary and the rule by a dot product of linear keys, and then the context by another; ours scores
  every (primary, context, rule) by the perceptron that makes the change. Linear keys cannot find a neighbour, nor the block
  that is pushed by the one that is moved; and with the whole action on every slot and one rule they cannot even find the
  slot that is acted on, because the action then shifts the scores of all slots alike.
- The paper's straight-through choice mixes the slots that go into the rule, so its gradient credits a slot with the change
  that was computed from another; ours mixes what comes out, the changes of all candidates.
- A slot is changed at most once at a time step (refraction); the paper's stages may choose it again.
- Noise is on at the beginning of training and falls to nothing, where a trainer says how far training is (``anneal``); in
  the paper it stays.
- While there is noise, a share of the rows sees a single context, drawn at random. Most moves are told from the primary
  alone, so the scores of its contexts drift apart for no reason until noise can no longer change the choice, and then the
  context that would tell the rare move is never tried.
"""

import torch
from torch import Tensor, nn

from ..attention import hard_choice
from ..core import Capabilities, State, Tokens, above_zero, at_least_one, present
from ..grouped import GroupedLinear


class Rules(nn.Module):
    """N rules, each with a condition and an action on pairs of slots.

    ``h_{pci} = MLP_i([f_p, f_c])`` for every primary p, context c (p itself among them) and rule i, ``f_k = [V_k, a_k]``;
    ``s_{pci} = w_i h_{pci}`` is the condition's score and ``u_{pci} = W_i h_{pci} + b_i`` the change.

    - sequential: ``p, c, i = argmax_{pci}(s_{pci} + gamma)``, ``V_p <- V_p + u_{pci}``, ``num_stages`` times, each time with
      another p;
    - parallel: for every p at once ``c, i = argmax_{ci}(s_{pci} + gamma)``, ``V_p <- V_p + u_{pci}``.

    In training gamma is Gumbel noise, and the choice is straight-through: forward the change of the chosen, backward
    ``sum_{pci} softmax(s / temperature)_{pci} u_{pci}``. In evaluation there is no noise, and only the changes of each
    primary's best pair are computed.

    The first layer of the MLP is the sum of one product a slot as primary and one as context; the rest costs K^2 pairs. Half
    of its units begin with opposite weights for the two slots, so that they see the difference: whether two objects are
    neighbours is then found in a few hundred steps, without it in thousands.

    Args:
        token_size: slot and attached action.
        num_slots: K; any other number may be given later.
        slot_size: D.
        num_rules: N.
        num_stages: rules applied one after another at each time step; a push, which moves two blocks, needs two.
        parallel: one rule to every slot at once, instead of one to a single slot.
        hidden_size: of a rule's perceptron.
        num_layers: its hidden layers; LayerNorm in all after the first.
        temperature: of the softmax that the gradient comes from.
        noise: of the Gumbel noise when training begins.
        explore: share of rows that see one context, drawn at random, when training begins; it falls as the noise does.
        noise_until: the share of training after which there is none.
    """

    capabilities = Capabilities(memory=False, rules=True)
    rules_see = "token"

    def __init__(
        self,
        token_size: int,
        num_slots: int,
        slot_size: int,
        *,
        num_rules: int = 1,
        num_stages: int = 1,
        parallel: bool = False,
        hidden_size: int = 128,
        num_layers: int = 2,
        temperature: float = 0.5,
        noise: float = 1.0,
        explore: float = 0.5,
        noise_until: float = 0.7,
    ):
        super().__init__()
        at_least_one(num_rules=num_rules, num_stages=num_stages, hidden_size=hidden_size, num_layers=num_layers)
        above_zero(temperature=temperature)
        if token_size < slot_size:
            raise ValueError(f"token_size is {token_size}; a token begins with its slot, so give at least {slot_size}")
        self.token_size = token_size
        self.num_slots = num_slots
        self.slot_size = slot_size
        self.num_rules = num_rules
        self.num_stages = num_stages
        self.parallel = parallel
        self.temperature = temperature
        self.noise, self.explore, self.noise_until = noise, explore, noise_until
        self.as_primary = nn.Linear(token_size, num_rules * hidden_size)
        self.as_context = nn.Linear(token_size, num_rules * hidden_size, bias=False)
        self.hidden = nn.ModuleList(GroupedLinear(num_rules, hidden_size, hidden_size) for _ in range(num_layers - 1))
        self.norms = nn.ModuleList(nn.LayerNorm(hidden_size) for _ in range(num_layers - 1))
        self.condition = GroupedLinear(num_rules, hidden_size, 1, bias=False)
        self.action = GroupedLinear(num_rules, hidden_size, slot_size)
        with torch.no_grad():
            primary, context = (
                layer.weight.unflatten(0, (num_rules, -1)) for layer in (self.as_primary, self.as_context)
            )
            context[:, : hidden_size // 2, :slot_size] = -primary[:, : hidden_size // 2, :slot_size]
        self.done: Tensor
        self.register_buffer("done", torch.ones(()))

    def anneal(self, done: float) -> None:
        """Say how far training is, 0 to 1."""
        self.done.fill_(done)

    def initial_state(self, batch_size: int, slots: Tensor | None = None) -> State:
        """The empty state: this core has no memory."""
        return {}

    def prepare(self, tokens: Tokens) -> Tokens:
        """The tokens hold the slots themselves; absent ones become zeros."""
        return tokens._replace(features=present(tokens))

    def forward(self, tokens: Tokens, state: State) -> tuple[Tensor, State]:
        """The change of every slot over all stages, ``(B, K, D)``, and the empty state."""
        return self.run(tokens)[0], state

    def run(self, tokens: Tokens, may_change: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """The change of every slot and what was chosen, as ``explain`` names it.

        Args:
            tokens: slots and what is attached to them.
            may_change: ``(B, K)`` bool, which slots rules may change; the others are contexts alone. None for all.
        """
        slots, attached = tokens.features.split([self.slot_size, self.token_size - self.slot_size], dim=-1)
        start, (B, K, _), N = slots, slots.shape, self.num_rules
        there = slots.new_ones(B, K, dtype=torch.bool) if tokens.mask is None else tokens.mask
        free = there if may_change is None else there & may_change  # slots that may still be changed
        chosen = []
        for _ in range(self.num_stages):
            hidden = self._hidden(torch.cat([slots, attached], dim=-1))  # (B, K, K, N, H)
            allowed = (free[:, :, None] & self._contexts(there)[:, None]).unsqueeze(-1).expand(B, K, K, N)
            scores = self.condition(hidden)[..., 0]
            scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
            groups = scores.flatten(2) if self.parallel else scores.flatten(1)[:, None]  # (B, K or 1, candidates)
            choice = self._choose(groups).reshape(B, K, K * N) * allowed.flatten(2)
            applies = choice.detach().sum(-1).round()  # (B, K)
            if self.training:
                change = choice[:, :, None] @ self.action(hidden).flatten(2, 3)
            else:
                best = scores.flatten(2).argmax(-1)  # of each primary
                pair = hidden.flatten(2, 3).gather(2, best[:, :, None, None].expand(-1, -1, 1, hidden.shape[-1]))
                change = self._act(pair[:, :, 0], best % N)[:, :, None] * applies[..., None, None]
            slots = slots + change[:, :, 0]
            if not self.parallel:
                free = free & (applies == 0)
            chosen.append((choice.detach().argmax(-1), applies))
        return slots - start, self._named(chosen)

    def _hidden(self, features: Tensor) -> Tensor:
        """What the rules find in all pairs, ``(B, K, K, N, H)``: primary, context, rule."""
        pairs = self.as_primary(features)[:, :, None] + self.as_context(features)[:, None]
        hidden = torch.relu(pairs).unflatten(-1, (self.num_rules, -1))
        for layer, norm in zip(self.hidden, self.norms, strict=True):
            hidden = torch.relu(norm(layer(hidden)))
        return hidden

    def _contexts(self, there: Tensor) -> Tensor:
        """Which slots a rule may look at, ``(B, K)`` bool: all that are there; of exploring rows, one of them."""
        if not (self.training and self.explore and self.noise_until):
            return there
        drawn = torch.rand(there.shape, device=there.device).masked_fill(~there, -1.0).argmax(-1, keepdim=True)
        only = torch.zeros_like(there).scatter(1, drawn, True)
        exploring = torch.rand(len(there), 1, device=there.device) < self.explore * self._unsettled()
        return there & (only | ~exploring)

    def _choose(self, scores: Tensor) -> Tensor:
        """One of the last axis, one-hot, with a straight-through gradient; noisy in training."""
        noisy = self.training and self.noise_until
        noise = self.noise * self._unsettled() if noisy else False
        return hard_choice(scores, noise=noise, temperature=self.temperature)

    def _unsettled(self) -> Tensor:
        """1 when training begins, 0 from ``noise_until`` on."""
        return (1.0 - self.done / self.noise_until).clamp(min=0.0)

    def _act(self, hidden: Tensor, rule: Tensor) -> Tensor:
        """The chosen rule's change ``(B, K, D)`` of what it found, ``hidden (B, K, H)``."""
        changes = self.action(hidden[:, :, None].expand(-1, -1, self.num_rules, -1))
        return changes.gather(2, rule[..., None, None].expand(-1, -1, 1, self.slot_size))[:, :, 0]

    def _named(self, chosen: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
        best, applies = (torch.stack(part, dim=1) for part in zip(*chosen, strict=True))  # (B, stages, K)
        rule, context = best % self.num_rules, best // self.num_rules
        if self.parallel:
            none = applies == 0
            return {"rule": rule.masked_fill(none, -1), "context": context.masked_fill(none, -1)}
        primary = applies.argmax(-1, keepdim=True)
        none = applies.sum(-1) == 0
        named = {
            "rule": rule.gather(2, primary)[..., 0],
            "primary": primary[..., 0],
            "context": context.gather(2, primary)[..., 0],
        }
        return {name: part.masked_fill(none, -1) for name, part in named.items()}

    def explain(self, tokens: Tokens, state: State) -> dict[str, Tensor]:
        """What was chosen; -1 where no rule was applied.

        Sequential, per stage ``(B, stages)``: "rule", the slot it changed ("primary") and the one it looked at ("context").
        Parallel, per stage and slot ``(B, stages, K)``: the "rule" that changed it and its "context".
        """
        return self.run(tokens)[1]
