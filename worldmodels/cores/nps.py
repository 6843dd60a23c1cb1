"""Neural Production Systems: a few rules, each applied to one slot in the light of a slot, often another.

Goyal et al. 2021, "Neural Production Systems", section 3, Algorithms 1 (sequential) and 2 (parallel).

The first ``slot_size`` features of a token are the slot V_i; the rest (the action) is attached to it unchanged at every
stage, and rules change the slot alone: the paper's Table 7 lets a rule's output be as long as V, action included, but an
action is not state. With ``rules_see="slot"`` what is attached takes part in the choices but not in the rules: so the
arithmetic task (appendix D) lets the choices see the true output that the rules must not copy. Cores say it by an attribute
``rules_see``, for tasks that must know.

Departures:
- Step 3 queries with W^q in section 3.1 and with a matrix of its own in the algorithms; we follow the algorithms.
- The keys that choose a context and those the null rule is compared with are both called W~^k in Algorithm 2; we give
  each its own matrix.
- The authors' released code has keys per slot, which ties the model to one number of slots; ours are shared, as in the
  paper, so the number of slots may change after training.
- The authors' code leaves the Gumbel noise on at evaluation; we choose by argmax there.

What the paper's setting cannot do:
- With the whole action on every slot (``action_to=full``, its block physics) and one rule, the keys being linear, the action
  adds the same to the score of every slot, so it cannot move the choice of the slot that changes.
- Primaries are chosen by keys of single slots, so the block that is pushed cannot be found: nothing in its own slot says that
  its neighbour is being moved into it. ``cores/rules.py`` has conditions on pairs.
- The straight-through gradient of Algorithm 1 goes through the slots that go into a rule: forward one slot, backward a
  mixture, so a slot is credited with the change that was computed from another. ``gradient="outputs"`` computes, in training,
  the changes of all candidates and mixes those instead.

``RoutingNPS`` is the paper's baseline for SNPS: the same rules, chosen by a perceptron (section 4.1 and appendix D).
"""

from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn

from ..attention import hard_choice, hide
from ..core import Capabilities, State, Tokens, above_zero, at_least_one, present
from ..grouped import GroupedConvolutions, GroupedMLP

RULES_SEE = ("token", "slot")
GRADIENTS = ("inputs", "outputs")


def _seen_size(token_size: int, slot_size: int, rules_see: str) -> int:
    """How many features of a token the rules' MLPs see.

    Raises:
        ValueError: neither "token" nor "slot".
    """
    if rules_see not in RULES_SEE:
        raise ValueError(f"rules_see is {rules_see!r}; expected one of {list(RULES_SEE)}")
    return token_size if rules_see == "token" else slot_size


_Networks = GroupedMLP | GroupedConvolutions


def _apply(mlps: _Networks, primary: Tensor, context: Tensor, rule: Tensor) -> Tensor:
    """Step 4: the chosen rule's MLP on what it sees of ``[V_p, V_c]``, ``(B, P, D)``; ``rule (B, P, N)`` is one-hot."""
    seen = mlps.input_size // 2
    pair = torch.cat([primary[..., :seen], context[..., :seen]], dim=-1)
    return (rule[..., None] * mlps.of_one(pair)).sum(-2)


def _apply_all(mlps: _Networks, features: Tensor, choice: Tensor) -> Tensor:
    """The changes of all candidates, chosen: ``sum_{c,i} choice_{pci} MLP_i([V_p, V_c])``, ``(B, K, D)``.

    ``features (B, K, F)``, ``choice (B, K, K, N)``: primary, context, rule.
    """
    seen, K = mlps.input_size // 2, features.shape[1]
    primary = features[:, :, None, :seen].expand(-1, K, K, seen)
    pair = torch.cat([primary, primary.transpose(1, 2)], dim=-1)
    return (choice[..., None] * mlps.of_one(pair)).sum((2, 3))


def _check_gradient(gradient: str) -> str:
    if gradient not in GRADIENTS:
        raise ValueError(f"gradient is {gradient!r}; expected one of {list(GRADIENTS)}")
    return gradient


class _Rules(nn.Module):
    """The rules R_i = (embedding, MLP_i), and the choices of a rule and of a context (steps 2 and 3)."""

    def __init__(
        self,
        token_size: int,
        slot_size: int,
        num_rules: int,
        rule_size: int,
        key_size: int,
        hidden_size: int,
        *,
        seen_size: int,
        map_size: int,
        matches: bool,
    ):
        super().__init__()
        self.embeddings = nn.Parameter(torch.randn(num_rules, rule_size))
        self.mlps: _Networks
        if map_size:
            self.mlps = GroupedConvolutions(num_rules, 2, slot_size, seen_size - slot_size, hidden_size, map_size)
        else:
            self.mlps = GroupedMLP(num_rules, 2 * seen_size, hidden_size, slot_size)
        if matches:
            self.rule_key = nn.Linear(rule_size, key_size, bias=False)  # W^k
            self.slot_query = nn.Linear(token_size, key_size, bias=False)  # W^q
        self.context_query = nn.Linear(token_size, key_size, bias=False)  # W~^q
        self.context_key = nn.Linear(token_size, key_size, bias=False)  # W~^k

    def match(self, tokens: Tensor) -> Tensor:
        """How well each rule fits each token, ``(B, K, N)``: ``q_j k_i`` of step 2."""
        return self.slot_query(tokens) @ self.rule_key(self.embeddings).T

    def context_scores(self, primary: Tensor, tokens: Tensor, mask: Tensor | None) -> Tensor:
        """How well each token fits as context of each primary, ``(B, P, K)``: ``q_{r,p} k_j`` of step 3."""
        return hide(self.context_query(primary) @ self.context_key(tokens).transpose(1, 2), mask)


class SNPS(nn.Module):
    """Sequential NPS: at each stage one (slot, rule) pair is chosen and only that slot changes (Algorithm 1).

    ``p, r = argmax_{j,i}(q_j k_i + gamma)``, ``c = argmax_j(q_{r,p} k_j + gamma)``,
    ``V_p <- V_p + MLP_r([V_p, V_c])``, repeated ``num_stages`` times.

    Args:
        token_size: slot and attached action.
        num_slots: M in the paper; any other number may be given later.
        slot_size: D.
        num_rules: N.
        num_stages: K in the paper, how many rules are applied one after another at each time step. One stage changes
            one slot, so a push, which moves two blocks, needs two.
        rule_size: size of a rule's embedding; 64 in the paper's physics experiments.
        key_size: of queries and keys; 32 in the paper.
        hidden_size: of a rule's MLP; 128 in the paper.
        rules_see: what a rule's MLP sees of a slot: the "token", or the "slot" without what is attached to it.
        map_size: of slots that are maps, their height and width: rules are then two convolutions, as the paper has them on
            ShapeStacks, with ``hidden_size`` channels between them; 0 where slots are vectors.
        temperature: of the Gumbel softmax; 1 in the paper.
        gradient: where the straight-through gradient of a choice goes: through the "inputs" of the rule as in the paper, or
            through the "outputs" of all candidates, which costs K N MLPs in place of each.
        score_dropout: probability of dropping a (slot, rule) score in training; 0.35 in the paper's arithmetic task.
    """

    capabilities = Capabilities(memory=False, rules=True)

    def __init__(
        self,
        token_size: int,
        num_slots: int,
        slot_size: int,
        *,
        num_rules: int = 1,
        num_stages: int = 1,
        rule_size: int = 64,
        key_size: int = 32,
        hidden_size: int = 128,
        rules_see: str = "token",
        map_size: int = 0,
        temperature: float = 1.0,
        gradient: str = "inputs",
        score_dropout: float = 0.0,
    ):
        super().__init__()
        at_least_one(num_rules=num_rules, hidden_size=hidden_size, num_stages=num_stages)
        above_zero(temperature=temperature)
        self.token_size = token_size
        self.num_slots = num_slots
        self.slot_size = slot_size
        self.num_rules = num_rules
        self.rules_see = rules_see
        self.map_size = map_size
        self.num_stages = num_stages
        self.temperature = temperature
        self.gradient = _check_gradient(gradient)
        self.rules = _Rules(
            token_size,
            slot_size,
            num_rules,
            rule_size,
            key_size,
            hidden_size,
            seen_size=_seen_size(token_size, slot_size, rules_see),
            map_size=map_size,
            matches=True,
        )
        self.score_dropout = nn.Dropout(score_dropout)

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
        start = slots
        mask = tokens.mask
        primaries = mask if may_change is None else may_change if mask is None else mask & may_change
        choose = partial(hard_choice, noise=self.training, temperature=self.temperature)
        chosen = []
        for _ in range(self.num_stages):
            features = torch.cat([slots, attached], dim=-1)
            scores = self.score_dropout(self.rules.match(features))
            if primaries is not None:
                scores = scores.masked_fill(~primaries[..., None], torch.finfo(scores.dtype).min)
            choice = choose(scores.flatten(1)).view_as(scores)  # (B, K, N), a single one
            if primaries is not None:
                choice = choice * primaries[..., None]  # if none may change, none does
            primary_slot, rule = choice.sum(2), choice.sum(1)  # (B, K), (B, N)
            if self.training and self.gradient == "outputs":
                context_of = choose(self.rules.context_scores(features, features, mask))  # (B, K, K)
                joint = choice[:, :, None] * context_of[..., None]
                slots = slots + _apply_all(self.rules.mlps, features, joint)
                context_slot = joint.sum((1, 3))
            else:
                primary = primary_slot[:, None] @ features  # (B, 1, F)
                context_slot = choose(self.rules.context_scores(primary, features, mask))  # (B, 1, K)
                change = _apply(self.rules.mlps, primary, context_slot @ features, rule[:, None])  # (B, 1, D)
                slots = slots + primary_slot[..., None] * change
                context_slot = context_slot[:, 0]
            chosen.append((rule.argmax(-1), primary_slot.argmax(-1), context_slot.argmax(-1)))
        rule_index, primary_index, context_index = (torch.stack(part, dim=1) for part in zip(*chosen, strict=True))
        return slots - start, {"rule": rule_index, "primary": primary_index, "context": context_index}

    def explain(self, tokens: Tokens, state: State) -> dict[str, Tensor]:
        """Per stage, ``(B, stages)``: "rule", the slot it changed ("primary") and the one it looked at ("context")."""
        return self.run(tokens)[1]


class PNPS(nn.Module):
    """Parallel NPS: every slot chooses a rule, or the Null rule and stays as it is (Algorithm 2).

    ``P = {j : R_a k_j + gamma > R_null k_j + gamma}``, ``r_p = argmax_i(q_p k_i + gamma)``,
    ``c_p = argmax_j(q_p k_j + gamma)``, ``V_p <- V_p + MLP_{r_p}([V_p, V_{c_p}])`` for all p of P at once.

    Args:
        token_size: slot and attached action.
        num_slots: M in the paper; any other number may be given later.
        slot_size: D.
        num_rules: N, the Null rule not counted.
        num_stages: how often the procedure is repeated at each time step; 1 in the paper.
        rule_size: size of a rule's embedding.
        key_size: of queries and keys; 32 in the paper.
        hidden_size: of a rule's MLP; 128 in the paper.
        rules_see: what a rule's MLP sees of a slot: the "token", or the "slot" without what is attached to it.
        map_size: of slots that are maps, their height and width: rules are then two convolutions, as the paper has them on
            ShapeStacks, with ``hidden_size`` channels between them; 0 where slots are vectors.
        temperature: of the Gumbel softmax; 1 in the paper.
        gradient: where the straight-through gradient of a choice goes: through the "inputs" of the rule as in the paper, or
            through the "outputs" of all candidates, which costs K N MLPs in place of each.
    """

    capabilities = Capabilities(memory=False, rules=True)

    def __init__(
        self,
        token_size: int,
        num_slots: int,
        slot_size: int,
        *,
        num_rules: int = 1,
        num_stages: int = 1,
        rule_size: int = 64,
        key_size: int = 32,
        hidden_size: int = 128,
        rules_see: str = "token",
        map_size: int = 0,
        temperature: float = 1.0,
        gradient: str = "inputs",
    ):
        super().__init__()
        at_least_one(num_rules=num_rules, hidden_size=hidden_size, num_stages=num_stages)
        above_zero(temperature=temperature)
        self.token_size = token_size
        self.num_slots = num_slots
        self.slot_size = slot_size
        self.num_rules = num_rules
        self.rules_see = rules_see
        self.map_size = map_size
        self.num_stages = num_stages
        self.temperature = temperature
        self.gradient = _check_gradient(gradient)
        self.chooses = num_rules > 1  # with a single rule there is nothing to choose in step 3
        self.rules = _Rules(
            token_size,
            slot_size,
            num_rules,
            rule_size,
            key_size,
            hidden_size,
            seen_size=_seen_size(token_size, slot_size, rules_see),
            map_size=map_size,
            matches=self.chooses,
        )
        self.any_rule = nn.Linear(num_rules * rule_size, key_size, bias=False)  # W^{R_a}
        self.null_rule = nn.Parameter(torch.randn(key_size) / key_size**0.5)  # R_Null
        self.null_key = nn.Linear(token_size, key_size, bias=False)  # the other W~^k

    def initial_state(self, batch_size: int, slots: Tensor | None = None) -> State:
        """The empty state: this core has no memory."""
        return {}

    def prepare(self, tokens: Tokens) -> Tokens:
        """The tokens hold the slots themselves; absent ones become zeros."""
        return tokens._replace(features=present(tokens))

    def forward(self, tokens: Tokens, state: State) -> tuple[Tensor, State]:
        """The change of every slot, ``(B, K, D)``, zero where the Null rule was chosen, and the empty state."""
        return self.run(tokens)[0], state

    def run(self, tokens: Tokens, may_change: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """The change of every slot and what was chosen, as ``explain`` names it.

        Args:
            tokens: slots and what is attached to them.
            may_change: ``(B, K)`` bool, which slots rules may change; the others are contexts alone. None for all.
        """
        slots, attached = tokens.features.split([self.slot_size, self.token_size - self.slot_size], dim=-1)
        start = slots
        mask = tokens.mask
        primaries = mask if may_change is None else may_change if mask is None else mask & may_change
        choose = partial(hard_choice, noise=self.training, temperature=self.temperature)
        chosen = []
        for _ in range(self.num_stages):
            features = torch.cat([slots, attached], dim=-1)
            any_rule = self.any_rule(self.rules.embeddings.flatten())
            keys = self.null_key(features)
            applies = choose(torch.stack([keys @ any_rule, keys @ self.null_rule], dim=-1))[..., 0]  # (B, K)
            if primaries is not None:
                applies = applies * primaries
            rule = features.new_ones(*features.shape[:2], 1)
            if self.chooses:
                rule = choose(self.rules.match(features))  # (B, K, N)
            context_slot = choose(self.rules.context_scores(features, features, mask))  # (B, K, K)
            if self.training and self.gradient == "outputs":
                change = _apply_all(self.rules.mlps, features, context_slot[..., None] * rule[:, :, None])
            else:
                change = _apply(self.rules.mlps, features, context_slot @ features, rule)
            slots = slots + applies[..., None] * change
            null = applies.detach().round() == 0
            chosen.append((rule.argmax(-1).masked_fill(null, -1), context_slot.argmax(-1).masked_fill(null, -1)))
        rule_index, context_index = (torch.stack(part, dim=1) for part in zip(*chosen, strict=True))
        return slots - start, {"rule": rule_index, "context": context_index}

    def explain(self, tokens: Tokens, state: State) -> dict[str, Tensor]:
        """Per stage and slot, ``(B, stages, K)``: the "rule" that changed it and its "context"; -1 for the Null rule."""
        return self.run(tokens)[1]


class RoutingNPS(nn.Module):
    """The baseline of NPS: rules as in SNPS, but chosen by one perceptron that sees all slots at once (appendix D).

    ``h = MLP([V_1, ..., V_M])``, four layers with ReLU; three linear heads on h choose the primary slot, the contextual
    slot and the rule; ``V_p <- V_p + MLP_r([V_p, V_c])``.

    The perceptron ties the model to one number and one order of slots. The paper does not say how the choices are made
    differentiable; we choose as NPS does, by the straight-through Gumbel softmax, and by argmax at evaluation.

    Args:
        token_size: slot and attached features.
        num_slots: M.
        slot_size: D.
        num_rules: N; 4 in the paper.
        hidden_size: of a rule's MLP; 16 in the paper's arithmetic task.
        routing_size: width of the four layers; 32 in the paper.
        rules_see: what a rule's MLP sees of a slot: the "token", or the "slot" without what is attached to it.
        temperature: of the Gumbel softmax.
    """

    capabilities = Capabilities(memory=False, rules=True)

    def __init__(
        self,
        token_size: int,
        num_slots: int,
        slot_size: int,
        *,
        num_rules: int = 4,
        hidden_size: int = 16,
        routing_size: int = 32,
        rules_see: str = "token",
        temperature: float = 1.0,
    ):
        super().__init__()
        at_least_one(num_rules=num_rules, hidden_size=hidden_size)
        above_zero(temperature=temperature)
        self.token_size = token_size
        self.num_slots = num_slots
        self.slot_size = slot_size
        self.num_rules = num_rules
        self.rules_see = rules_see
        self.temperature = temperature
        self.mlps = GroupedMLP(num_rules, 2 * _seen_size(token_size, slot_size, rules_see), hidden_size, slot_size)
        sizes = [num_slots * token_size, *[routing_size] * 4]
        layers = [part for a, b in pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())]
        self.routing = nn.Sequential(*layers)
        self.heads = nn.ModuleDict(
            {name: nn.Linear(routing_size, n) for name, n in (("primary", num_slots), ("context", num_slots))}
        )
        if num_rules > 1:
            self.heads["rule"] = nn.Linear(routing_size, num_rules)

    def initial_state(self, batch_size: int, slots: Tensor | None = None) -> State:
        """The empty state: this core has no memory."""
        return {}

    def prepare(self, tokens: Tokens) -> Tokens:
        """Absent tokens become zeros."""
        return tokens._replace(features=present(tokens))

    def forward(self, tokens: Tokens, state: State) -> tuple[Tensor, State]:
        """The change of every slot, ``(B, K, D)``, zero for all but one, and the empty state."""
        return self.run(tokens)[0], state

    def run(self, tokens: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
        """The change of every slot and what was chosen, as ``explain`` names it."""
        features = tokens.features
        hidden = self.routing(features.flatten(1))
        choice = {"rule": features.new_ones(len(features), 1)}
        for name, head in self.heads.items():
            scores = head(hidden) if name == "rule" else hide(head(hidden), tokens.mask)
            choice[name] = hard_choice(scores, noise=self.training, temperature=self.temperature)
        primary, context = (choice[name][:, None] @ features for name in ("primary", "context"))
        change = _apply(self.mlps, primary, context, choice["rule"][:, None])
        applies = choice["primary"] if tokens.mask is None else choice["primary"] * tokens.mask
        return applies[..., None] * change, {name: c.argmax(-1)[:, None] for name, c in choice.items()}

    def explain(self, tokens: Tokens, state: State) -> dict[str, Tensor]:
        """As SNPS with one stage, ``(B, 1)``: the "rule", the slot it changed ("primary") and its "context"."""
        return self.run(tokens)[1]
