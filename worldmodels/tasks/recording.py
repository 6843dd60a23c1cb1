"""Episodes that a task records where they were not recorded before, with a bar that says how far it is."""

from collections.abc import Mapping
from typing import Any

from ..data.collect import collected
from ..data.episodes import Episodes
from ..logging import progress_bar


def recorded(
    title: str, data_dir: Any, which: str, settings: Mapping[str, Any], *, quiet: bool, **options: Any
) -> Episodes:
    """What ``collected`` returns, see there; the bar is shown once an episode has been recorded.

    Args:
        title: of the bar.
        data_dir: see ``collected``.
        which: see ``collected``.
        settings: see ``collected``.
        quiet: without the bar.
        options: of ``collected``.
    """
    with progress_bar(title) as bar:
        bar.disable |= quiet
        shown = bar.add_task("", total=settings["episodes"], note="episodes", visible=False)
        return collected(
            data_dir,
            which,
            settings,
            progress=lambda done, _: bar.update(shown, completed=done, visible=True),
            **options,
        )
