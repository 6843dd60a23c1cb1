"""Which rule was used for which operation: shares, and the table as a picture."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from . import figures


def uses(operation: Tensor, rule: Tensor, num_operations: int, num_rules: int) -> dict[str, Any]:
    """How often each rule was used for each operation.

    Args:
        operation: of every example, ``(B,)``.
        rule: that was used for it, ``(B,)``; below 0 if none was.
        num_operations: how many there are.
        num_rules: how many there are.

    Returns:
        "uses", rows of counts; "null", how often none was used; "purity", the share of examples that use their operation's
        most used rule; "matched", the same where every operation must have a rule of its own, by the best assignment.
    """
    counts = torch.zeros(num_operations, num_rules + 1, dtype=torch.long)
    counts.index_put_((operation, torch.where(rule < 0, num_rules, rule)), torch.ones_like(rule), accumulate=True)
    rules, null = counts[:, :num_rules], counts[:, num_rules]
    rows, columns = linear_sum_assignment(-rules.numpy())
    return {
        "uses": rules.tolist(),
        "null": null.tolist(),
        "purity": float(rules.amax(1).sum() / len(rule)),
        "matched": float(rules[rows, columns].sum() / len(rule)),
    }


def table(
    results: Mapping[str, Mapping[str, Any]],
    title: str,
    operations: Sequence[str],
    errors: Mapping[str, Callable[[Mapping[str, Any]], str]],
    published: Mapping[str, tuple[str, str]],
) -> Table:
    """Errors and shares of every run, then how often each rule was used for each operation; the paper's figures below.

    Args:
        results: by the name of the run, with "scores" and "uses".
        title: above the table.
        operations: the names of the rows of "uses".
        errors: by the heading of its column, what a run's error is; the first is the one that was published.
        published: by model, its error and the share of examples that use their operation's own rule.
    """
    table = Table("", title=title, title_justify="left")
    most = max(len(result["uses"][0]) for result in results.values())
    for heading in (*(f"rule {r + 1}" for r in range(most)), *errors, "purity", "matched"):
        table.add_column(heading, justify="right")
    for name, result in results.items():
        shares = [f"{100 * result['scores'][key]:.1f} %" for key in ("purity", "matched")]
        table.add_row(name, *[""] * most, *(error(result) for error in errors.values()), *shares)
        for operation, row in zip(operations, result["uses"], strict=True):
            table.add_row(f"  {operation}", *(str(n) for n in row))
        table.add_section()
    for name, (error, share) in published.items():
        table.add_row(f"paper: {name}", *[""] * most, error, *[""] * (len(errors) - 1), share, share)
    return table


def draw(operations: Sequence[str], counts: Sequence[Sequence[int]], path: Path) -> Path:
    """How often each rule was used for each operation, shaded by its share of the operation."""
    shown = np.asarray(counts)
    shares = shown / np.maximum(shown.sum(1, keepdims=True), 1)
    figure = figures.blank(0.9 * shown.shape[1] + 3, 0.6 * len(operations) + 1.4, layout="constrained")
    axis = figure.subplots()
    image = axis.imshow(shares, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    for (o, r), count in np.ndenumerate(shown):
        axis.text(r, o, str(count), ha="center", va="center", color="white" if shares[o, r] > 0.5 else "black")
    axis.set_xticks(range(shown.shape[1]), [f"rule {r + 1}" for r in range(shown.shape[1])])
    axis.set_yticks(range(len(operations)), operations)
    figure.colorbar(image, ax=axis, label="share of the operation")
    axis.set(xlabel="rule that was applied", ylabel="operation of the example")
    axis.set_title("number of test examples by operation and rule", fontsize=10)
    return figures.save(figure, path)
