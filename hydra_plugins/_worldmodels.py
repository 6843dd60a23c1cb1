"""Our launcher and our sweeper where Hydra looks for them, which is in this package alone.

The underscore lets Hydra's search pass it by, so that no other program imports them: our commands call ``register``.
"""

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins

from worldmodels import launcher, tune
from worldmodels.plugins import options_of


class SideBySide(launcher.SideBySide):
    """See ``worldmodels.launcher``."""


class Tune(tune.Tune):
    """See ``worldmodels.tune``."""


def register() -> None:
    """Let Hydra find them; whether Optuna is here is asked when it is used."""
    for group, name, plugin in (("launcher", "side_by_side", SideBySide), ("sweeper", "tune", Tune)):
        Plugins.instance().register(plugin)
        node = {"_target_": f"{__name__}.{plugin.__name__}", **options_of(plugin)}
        ConfigStore.instance().store(group=f"hydra/{group}", name=name, node=node)
