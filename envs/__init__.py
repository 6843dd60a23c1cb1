"""Environments: importing this package registers ``worldmodels/...`` ids with Gymnasium."""

from gymnasium.envs.registration import register, registry

_FAMILIES = {
    "worldmodels/Shapes-v0": ("block_physics:make_shapes", 100),
    "worldmodels/BlockPhysics-v0": ("block_physics:make_block_physics", 100),
}

for _id, (_maker, _steps) in _FAMILIES.items():
    if _id not in registry:
        register(
            _id,
            entry_point=f"{__name__}.{_maker}",
            vector_entry_point=f"{__name__}.{_maker}_vec",
            max_episode_steps=_steps,
        )
