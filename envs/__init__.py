"""Environments: importing this package registers ``worldmodels/...`` ids with Gymnasium."""

from gymnasium.envs.registration import register, registry

_FAMILIES = {  # one copy, a batch of copies, steps of an episode
    "worldmodels/Shapes-v0": ("block_physics:make_shapes", "block_physics:make_shapes_vec", 100),
    "worldmodels/BlockPhysics-v0": ("block_physics:make_block_physics", "block_physics:make_block_physics_vec", 100),
    "worldmodels/GoToObjMaze-v0": ("babyai:make_goto_obj_maze", "babyai:GoToObjMaze", None),  # its mazes have a limit
    "worldmodels/Recall-v0": ("memory:make_recall", "memory:Recall", None),
    "worldmodels/CartPole-v0": ("memory:make_cart_pole", "memory:CartPole", 500),
    "worldmodels/BouncingBalls-v0": ("bouncing_balls:make_bouncing_balls", "bouncing_balls:BouncingBalls", 100),
    "worldmodels/OneBall-v0": ("one_ball:make_one_ball", "one_ball:OneBall", 50),
    "worldmodels/Occluders-v0": ("occluders:make_occluders", "occluders:Occluders", 40),
    "worldmodels/Sprites-v0": ("sprites:make_sprites", "sprites:Sprites", 20),
    "worldmodels/Towers-v0": ("towers:make_towers", "towers:Towers", 30),
    "worldmodels/Skirmish-v0": ("skirmish:make_skirmish", "skirmish:Skirmish", 100),
}

for _id, (_single, _vector, _steps) in _FAMILIES.items():
    if _id not in registry:
        register(
            _id,
            entry_point=f"{__name__}.{_single}",
            vector_entry_point=f"{__name__}.{_vector}",
            max_episode_steps=_steps,
        )

if "worldmodels/MiniGrid-v0" not in registry:  # takes env_id=, any id of minigrid's
    register("worldmodels/MiniGrid-v0", entry_point=f"{__name__}.babyai:make_minigrid")

if "worldmodels/Atari-v0" not in registry:  # takes game=, any of ale-py's ROMs
    register("worldmodels/Atari-v0", entry_point=f"{__name__}.atari:Atari", max_episode_steps=10)

# Others' worlds, which need what they are made of: the extras flatland and starcraft.
for _id, _single in (
    ("worldmodels/Flatland-v0", "flatland:Flatland"),
    ("worldmodels/StarCraft2-v0", "starcraft:StarCraft2"),
):
    if _id not in registry:
        register(_id, entry_point=f"{__name__}.{_single}")
