"""Arithmetic on coordinates: NPS's task."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor, nn

from ..core import RuleCore, Tokens
from ..data import sequences as data
from ..errors import UserError
from ..models.sequence import SlotChange
from ..report import figures, rules
from . import Batch, CoreBuilder, refuse_equal_seeds, refuse_nothing

_TOKEN_SIZE, _SLOT_SIZE = 4, 2  # a coordinate before and after, and before

PUBLISHED = {
    "NPS, 4 rules": ("0.010 ± 0.001", ""),
    "NPS, 5 rules": ("", "81.5 %"),
    "routing MLP": ("0.040 ± 0.008", ""),
}
"""Goyal et al. 2021, section 4.1: the error, and the purity of its Table 2, which there is the matched share too."""


class CoordinateArithmetic:
    """Find four operations in examples of their input and output, one rule for each.

    Goyal et al. 2021, "Neural Production Systems", section 4.1 and appendix D; see ``data.sequences.coordinate_arithmetic``.
    A token is a coordinate before and after. The choice of slot, context and rule sees both; the rule's MLP sees the
    coordinates before alone, so it cannot copy the output. Fixed training and test sets; the error is the mean squared one
    over both slots and both coordinates.

    A rule is counted for an operation where the core chose it (of a core that changes every slot: for the coordinate that
    the operation changed). ``purity``: the share of examples that use their operation's most used rule. ``matched``: the same
    where every operation must have a rule of its own, the best assignment of rules to operations.

    Args:
        train_size: training examples.
        train_seed: of the training set.
        test_size: test examples.
        test_seed: of the test set.
    """

    name = "arithmetic"
    sections = ()
    tags = ("task", "task/score")
    unit = "sequences"

    def __init__(self, *, train_size: int = 10_000, train_seed: int = 1, test_size: int = 2000, test_seed: int = 3):
        refuse_equal_seeds(train_seed, test_seed)
        refuse_nothing(train_size=train_size, test_size=test_size)
        self.train_size, self.train_seed = train_size, train_seed
        self.test_size, self.test_seed = test_size, test_seed

    def collect(self, *, quiet: bool = False) -> None:
        """Nothing: examples are made as they are needed."""

    def about(self) -> dict[str, Any]:
        """Nothing: the options say it all."""
        return {}

    def model(self, core: CoreBuilder, about: Mapping[str, Any]) -> SlotChange:
        """A ``SlotChange``; refuses a core whose rules see the whole token, for they could copy the answer."""
        built = core(_TOKEN_SIZE, num_tokens=2, num_slots=2, slot_size=_SLOT_SIZE)
        if not built.capabilities.rules or built.capabilities.memory or built.slot_size != _SLOT_SIZE:
            raise UserError(
                f"the arithmetic task needs a core that applies rules to slots of {_SLOT_SIZE}, like core=snps or "
                f"core=routing; got {type(built).__name__} with slots of {built.slot_size}"
            )
        if cast(RuleCore, built).rules_see != "slot":
            raise UserError(
                "the arithmetic task's tokens hold the answer, which the choices may see and the rules must not; set "
                "core.rules_see=slot"
            )
        return SlotChange(built)

    def batches(self, batch_size: int, device: torch.device) -> Callable[[torch.Generator], Batch]:
        """Tokens ``(B, 2, 4)``."""
        tokens, _, _ = data.coordinate_arithmetic(self.train_size, data.generator(self.train_seed, 0))
        return data.drawn((tokens,), batch_size, device)

    def losses(self, model: nn.Module, batch: Batch, generator: torch.Generator) -> dict[str, Tensor]:
        """The mean squared error."""
        (tokens,) = batch
        return {"loss": F.mse_loss(model(tokens), tokens[..., _SLOT_SIZE:])}

    @torch.no_grad()
    def evaluate(self, model: SlotChange, limit: int | None = None, *, quiet: bool = True) -> dict[str, Any]:
        """The error beside that of copying the input and of the mean, and which rule was used for which operation."""
        device = next(model.parameters()).device
        tokens, operation, primary = data.coordinate_arithmetic(self.test_size, data.generator(self.test_seed, 0))
        tokens, operation, primary = tokens[:limit], operation[:limit], primary[:limit]
        before, after = tokens.split(_SLOT_SIZE, dim=-1)
        pred = model(tokens.to(device)).cpu()
        chosen = {name: part.cpu() for name, part in model.core.explain(Tokens(tokens.to(device)), {}).items()}
        rule = chosen["rule"][:, 0]
        if rule.dim() == 2:  # a rule for each slot
            rule = rule[torch.arange(len(rule)), primary]
        right_slot = chosen["primary"][:, 0] == primary if "primary" in chosen else rule >= 0
        count = max(int(rule.max()) + 1, cast(RuleCore, model.core).num_rules)
        used = rules.uses(operation, rule, len(data.OPERATIONS), count)
        scores = {
            "mse": float(F.mse_loss(pred, after)),
            "purity": used["purity"],
            "matched": used["matched"],
            "right_slot": float(right_slot.double().mean()),
        }
        return {
            "scores": scores,
            "copy_mse": float(F.mse_loss(before, after)),
            "mean_mse": float((after - after.mean(0)).square().mean()),
            "uses": used["uses"],
            "null": used["null"],
            "n": len(rule),
        }

    def objective(self, result: Mapping[str, Any]) -> float:
        """Minus the mean squared error."""
        return -float(result["scores"]["mse"])

    def table(self, results: Mapping[str, Mapping[str, Any]], of: str) -> Table:
        """Errors and shares, then how often each rule was used for each operation."""
        errors = {
            "MSE": lambda result: f"{result['scores']['mse']:.5f}",
            "of copying": lambda result: f"{result['copy_mse']:.5f}",
            "of the mean": lambda result: f"{result['mean_mse']:.5f}",
        }
        return rules.table(results, f"{of}: test data", data.OPERATIONS, errors, PUBLISHED)

    def draw(
        self,
        model: SlotChange,
        result: Mapping[str, Any],
        metrics: Sequence[Mapping[str, Any]],
        folder: Path,
        example: int,
    ) -> list[Path]:
        """The table of operations and rules as a picture."""
        curves = figures.curves(metrics, folder / "curves.png")
        return [*curves, rules.draw(data.OPERATIONS, result["uses"], folder / "rules.png")]
