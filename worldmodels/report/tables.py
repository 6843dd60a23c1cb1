"""Tables of scores."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table

_SECTIONS = {"all": "all", "in_episode": "in-episode", "moved": "with a push"}


def show(table: RenderableType) -> None:
    """Print a table, as wide as it needs to be where output is no terminal."""
    console = Console(markup=False)
    if not console.is_terminal:
        console = Console(markup=False, width=120)
    console.print(table)


def scores(evaluations: Mapping[str, Mapping[str, Any]], title: str) -> Table:
    """One table of several models' evaluations: H@1 and MRR in percent at each horizon, beside the latent copy.

    Args:
        evaluations: by name, what ``evaluate`` returned.
        title: above the table.
    """
    horizons = list(next(iter(evaluations.values()))["all"])
    table = Table(title=title, title_justify="left")
    table.add_column("ranked\namong")
    table.add_column("model")
    for h in horizons:
        steps = "1 step" if h == "1" else f"{h} steps"
        table.add_column(f"{steps}\nH@1 / MRR", justify="right")
    table.add_column(f"95 % of\nH@1 at {horizons[-1]}", justify="right")
    table.add_column("n", justify="right")
    for section, heading in _SECTIONS.items():
        if not any(evaluation[section] for evaluation in evaluations.values()):
            continue
        table.add_section()
        for name, evaluation in evaluations.items():
            entries = evaluation[section]
            table.add_row(heading, name, *_row(entries, horizons, "", ""))
            table.add_row("", "  its latent copy", *_row(entries, horizons, "copy_", ""))
            if section == "all" and all("true_copy_h@1" in entry for entry in entries.values()):
                table.add_row("", "  copy of the true state", *_row(entries, horizons, "true_copy_", ""))
            if section == "in_episode":
                chance = [f"{100 * entries[h]['chance']:.1f}" if h in entries else "" for h in horizons]
                table.add_row("", "  chance", *chance, "", "")
            heading = ""
    return table


def _row(entries: Mapping[str, Mapping[str, Any]], horizons: list[str], prefix: str, absent: str) -> list[str]:
    cells = []
    for h in horizons:
        entry = entries.get(h)
        cells.append(f"{100 * entry[f'{prefix}h@1']:.1f} / {100 * entry[f'{prefix}mrr']:.1f}" if entry else "-")
    last = entries.get(horizons[-1])
    if prefix or last is None:
        return [*cells, absent, absent]
    low, high = last["ci95"]
    counts = "/".join(dict.fromkeys(str(entries[h]["n"]) for h in horizons if h in entries))
    return [*cells, f"{100 * low:.1f} to {100 * high:.1f}", counts]
