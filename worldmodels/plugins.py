"""From names to what they stand for: our tables, what installed packages add by entry point, and paths of classes."""

import inspect
import logging
from collections.abc import Mapping
from functools import partial
from importlib.metadata import entry_points
from typing import Annotated, Any

import torch
from hydra.utils import get_class
from omegaconf import MISSING

from .core import RecurrentCore, SequenceReader, Tokens, unroll
from .errors import UserError, first_line, nearest
from .ranges import AT_LEAST_ONE, check_ranges, check_types

logging.getLogger("hydra.utils").addHandler(logging.NullHandler())  # what get_class raises says it all


def options_of(target: Any) -> dict[str, Any]:
    """The keyword-only arguments of a callable and their defaults."""
    parameters = inspect.signature(target).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def offered(group: str, table: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Our table of a group and what installed packages add under the entry point ``worldmodels.<group>``."""
    names = {name: dict(entry) for name, entry in table.items()}
    for entry in entry_points(group=f"worldmodels.{group}"):
        names.setdefault(entry.name, {"_target_": entry.value.replace(":", ".")})
    return names


def named(group: str, table: Mapping[str, Mapping[str, Any]], name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """What to build of a group: an entry by its name, or a class by its path, with all its options."""
    entry = offered(group, table).get(name, {"_target_": name})
    return {**constructor_options(entry["_target_"]), **entry, **options}


def constructor_options(path: str) -> dict[str, Any]:
    """The options of the class a path names, without the sections of the config a task asks for; none if it is not there."""
    try:
        target = get_class(path)
        sections = getattr(target, "sections", ())
        return {name: default for name, default in options_of(target).items() if name not in sections}
    except (ImportError, ValueError, TypeError, AttributeError):
        return {}  # a broken plug-in must not stop those who do not use it; using it gives the import error


def constructor(what: str, config: Mapping[str, Any]) -> Any:
    """The class a config's ``_target_`` names.

    Raises:
        UserError: no such class.
    """
    path = config.get("_target_")
    if not isinstance(path, str) or not path or path == MISSING:
        said = f"is {path!r}" if path and path != MISSING else "is not set"
        raise UserError(f"{what}._target_ {said}; give the path of a class, like {what}._target_=my.module.Name")
    try:
        return get_class(path)
    except (ImportError, ValueError, AttributeError) as error:
        reason = first_line(error.__cause__ or error)
        raise UserError(f"{what}._target_={path} cannot be imported: {reason}") from error


def build(what: str, config: Mapping[str, Any], *sizes: Any, **more: Any) -> Any:
    """Call the constructor a config's ``_target_`` names.

    Raises:
        UserError: no such thing, an option it does not take, or a value it refuses.
    """
    options = {key: value for key, value in config.items() if key != "_target_"} | more
    target = constructor(what, config)
    known = options_of(target)
    for key in options:
        if key not in known:
            more_known = ("num_slots", "slot_size") if what == "core" and not _reads_sequences(target) else ()
            raise UserError(f"{target.__name__} does not take {what}.{key}; {nearest(key, (*known, *more_known))}")
    check_types(what, target, options)
    check_ranges(what, target, options)
    try:
        return target(*sizes, **options)
    except (ValueError, TypeError, RuntimeError, ArithmeticError, LookupError, AttributeError) as error:
        raise UserError(f"{what} {target.__name__}: {first_line(error)}") from error


def build_encoder(
    config: Mapping[str, Any],
    observation_shape: tuple[int, ...],
    num_slots: Annotated[int, AT_LEAST_ONE],
    slot_size: Annotated[int, AT_LEAST_ONE],
) -> Any:
    """An encoder, tried on an observation of zeros, so that what cannot work is refused before training.

    Args:
        config: the encoder's name and options.
        observation_shape: ``(H, W, C)`` of pictures, or ``(n,)``.
        num_slots: K.
        slot_size: D.

    Raises:
        UserError: naming what the encoder said.
    """
    check_ranges("encoder", build_encoder, {"num_slots": num_slots, "slot_size": slot_size})
    encoder = build("encoder", config, observation_shape, num_slots, slot_size)
    name, picture = type(encoder).__name__, len(observation_shape) == 3
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            seen = torch.zeros(1, *observation_shape, dtype=torch.uint8 if picture else torch.float32)
            slots = encoder.eval()(seen)  # in training it might take a mean over what it has seen
            encoder.train()
    except (RuntimeError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError) as error:
        line = first_line(error)
        raise UserError(f"encoder {name} cannot take observations {observation_shape}: {line}") from error
    if tuple(slots.shape) != (1, num_slots, slot_size):
        raise UserError(f"encoder {name} makes slots {tuple(slots.shape[1:])}; expected {(num_slots, slot_size)}")
    return encoder


def build_core(
    config: Mapping[str, Any],
    token_size: int,
    num_slots: Annotated[int, AT_LEAST_ONE],
    slot_size: Annotated[int, AT_LEAST_ONE],
    num_tokens: int,
    position_size: int | None = None,
) -> RecurrentCore:
    """A core for so many tokens, tried on two steps of zeros, so that what cannot work is refused before training.

    Args:
        config: the core's name and options.
        token_size: F.
        num_slots: K.
        slot_size: D.
        num_tokens: N.
        position_size: P, if tokens have positions, for cores that know where.

    Raises:
        UserError: naming what the core said.
    """
    if config.get("num_tokens", None) not in (None, num_tokens):
        raise UserError(f"core.num_tokens={config['num_tokens']}, but a step has {num_tokens} tokens; leave it out")
    more = {"num_tokens": num_tokens} if "num_tokens" in config else {}
    positions = None
    if position_size is not None and "position_size" in config:
        if config["position_size"] not in (None, position_size):
            raise UserError(
                f"core.position_size={config['position_size']}, but positions have {position_size}; leave it out"
            )
        more["position_size"] = position_size
        positions = torch.zeros(2, 1, num_tokens, position_size)
    core: RecurrentCore = build("core", config, token_size, num_slots, slot_size, **more)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            unroll(core, Tokens(torch.zeros(2, 1, num_tokens, token_size), positions), core.initial_state(1))
    except (RuntimeError, ValueError, IndexError, ZeroDivisionError) as error:
        line = first_line(error)
        raise UserError(f"core {type(core).__name__} cannot take a step of {num_tokens} tokens: {line}") from error
    return core


def refuse_reader(target: Any) -> None:
    """Refuse the class of a ``SequenceReader`` where a core has to take single steps.

    Raises:
        UserError: it has no state to carry from step to step.
    """
    if _reads_sequences(target):
        raise UserError(
            f"{target.__name__} reads whole sequences at once and keeps no state between steps, so it serves only tasks like "
            "experiment=relations; choose a core that takes single steps, such as core=lstm"
        )


def _reads_sequences(target: Any) -> bool:
    return not hasattr(target, "initial_state") and not hasattr(target, "capabilities")


def build_reader(config: Mapping[str, Any], token_size: int, length: int, num_tokens: int) -> SequenceReader:
    """A reader of whole sequences, tried on a sequence of zeros, so that what cannot work is refused before training.

    Args:
        config: the reader's name and options.
        token_size: F.
        length: T, steps.
        num_tokens: N.

    Raises:
        UserError: naming what the reader said.
    """
    reader: SequenceReader = build("core", config, token_size, length * num_tokens)
    try:
        with torch.no_grad():
            reader(Tokens(torch.zeros(length, 1, num_tokens, token_size)))
    except (RuntimeError, ValueError, IndexError, ZeroDivisionError) as error:
        line = first_line(error)
        raise UserError(
            f"core {type(reader).__name__} cannot read {length} steps of {num_tokens} tokens: {line}"
        ) from error
    return reader


def core_builder(config: Mapping[str, Any]) -> partial[Any]:
    """``build_core`` for the core of a config, whose own ``num_slots`` and ``slot_size`` go before those a task asks for.

    Where a task says how long its sequences are, it is ``build_reader`` for a reader.
    """
    return partial(_in_sizes, dict(config))


def _in_sizes(
    config: Mapping[str, Any],
    token_size: int,
    num_tokens: int,
    num_slots: int,
    slot_size: int,
    position_size: int | None = None,
    length: int | None = None,
) -> RecurrentCore | SequenceReader:
    target = constructor("core", config)
    if length is None:
        refuse_reader(target)
    elif _reads_sequences(target):
        return build_reader(config, token_size, length, num_tokens)
    options = {key: value for key, value in config.items() if key not in ("num_slots", "slot_size")}
    given = {name: value for name in ("num_slots", "slot_size") if (value := config.get(name)) is not None}
    check_ranges("core", build_core, given)
    sizes = {"num_slots": num_slots, "slot_size": slot_size} | given
    return build_core(options, token_size, sizes["num_slots"], sizes["slot_size"], num_tokens, position_size)
