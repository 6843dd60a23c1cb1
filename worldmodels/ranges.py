"""The values that an option may have, stated beside it and checked in one place.

>>> def train(steps: Annotated[int, AT_LEAST_ONE] = 1000): ...
>>> check_ranges("trainer", train, {"steps": 0})  # doctest: +SKIP
worldmodels.errors.UserError: trainer.steps=0; expected a whole number of at least 1
"""

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from .errors import UserError


@dataclass(frozen=True)
class Range:
    """From ``least`` to ``most``, both included, or only what is ``above``; always finite."""

    least: int | float = -math.inf
    most: int | float = math.inf
    above: int | float = -math.inf

    def __contains__(self, value: int | float) -> bool:
        return self.least <= value <= self.most and value > self.above and not math.isinf(value)

    def __str__(self) -> str:
        low = f"above {self.above:g}" if self.above > -math.inf else f"of at least {self.least:g}"
        if self.least == self.above == -math.inf:
            return "that is finite"
        return low if self.most == math.inf else f"{low} and at most {self.most:,}"


LARGEST = 2**40
"""Of whole numbers; more steps, rows or units than these are a slip."""
SIZES = (1e-30, 1e30)
"""Between which other numbers lie, or are 0."""

AT_LEAST_ONE = Range(1)
NOT_NEGATIVE = Range(0)
POSITIVE = Range(above=0)
SHARE = Range(0, 1)
SEED = Range(0, 2**32 - 1)


def check_ranges(what: str, target: Any, values: Mapping[str, Any]) -> None:
    """Refuse values beyond the ranges, or of other types, than a dataclass or the signature of a callable states.

    Args:
        what: where the values stand, like "trainer"; "" at the top.
        target: whose annotations say ``Annotated[int, Range(1)]``; of a dataclass sections that are dataclasses are looked
            through as well.
        values: by name; names that are not annotated so are passed over.

    Raises:
        UserError: naming the first.
    """
    for name, hint in _hints(target).items():
        if name not in values:
            continue
        value, key = values[name], f"{what}.{name}" if what else name
        if is_dataclass(hint) and isinstance(value, Mapping):
            check_ranges(key, hint, value)
        elif get_origin(hint) is Annotated:
            kind, allowed = get_args(hint)
            several = "list[" in str(kind)
            for one in value if several and isinstance(value, (list, tuple)) else [value]:
                _check(key, value, one, kind, allowed)


def _check(key: str, value: Any, one: Any, kind: Any, allowed: Range) -> None:
    if (one is None and (kind is Any or NoneType in get_args(kind))) or (kind is Any and callable(one)):
        return
    whole = "int" in str(kind) and "float" not in str(kind)
    number = isinstance(one, int if whole else (int, float)) and not isinstance(one, bool)
    if not number or one not in allowed:
        raise UserError(f"{key}={value}; expected {'a whole number' if whole else 'a number'} {allowed}")
    _refuse_size(key, one)


def _refuse_size(key: str, value: Any) -> None:
    """Refuse numbers, or lists with numbers, that are too large or too small to compute with."""
    for one in value if isinstance(value, (list, tuple)) else [value]:
        if isinstance(one, (list, tuple)):
            _refuse_size(key, one)
        elif isinstance(one, int) and abs(one) > LARGEST:
            raise UserError(f"{key}={value}; expected whole numbers of at most {LARGEST:,}")
        elif isinstance(one, float) and one and math.isfinite(one) and not SIZES[0] <= abs(one) <= SIZES[1]:
            raise UserError(f"{key}={value}; expected numbers between {SIZES[0]:g} and {SIZES[1]:g} in size, or 0")


def _hints(target: Any) -> dict[str, Any]:
    function = target.__init__ if inspect.isclass(target) and not is_dataclass(target) else target
    try:
        return get_type_hints(function, include_extras=True)
    except (NameError, TypeError, AttributeError):  # a plug-in's annotations may name what is not there at run time
        return {}


def check_types(what: str, target: Any, values: Mapping[str, Any]) -> None:
    """Refuse values of other types than the signature of a callable states; what is its own default may be anything.

    Args:
        what: what is built of it, like "core".
        target: a class or a function; what it annotates otherwise than with numbers, text, truth, lists and mappings is
            passed over.
        values: by name.

    Raises:
        UserError: naming the first.
    """
    hints, parameters = _hints(target), inspect.signature(target).parameters
    for name, value in values.items():
        hint = hints.get(name, Any)
        hint = get_args(hint)[0] if get_origin(hint) is Annotated else hint
        _refuse_size(f"{what}.{name}", value)
        if not _fits(value, hint) and not (name in parameters and value == parameters[name].default):
            raise UserError(f"{what}.{name}={value!r}; expected {_words(hint)}")


_WORDS = {
    Path: "a path",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    NoneType: "null",
}


def _fits(value: Any, hint: Any) -> bool:
    origin, inside = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, one) for one in inside)
    if hint in (int, float):
        number = isinstance(value, int if hint is int else (int, float)) and not isinstance(value, bool)
        return number and math.isfinite(value)
    if hint in _WORDS:
        return isinstance(value, (str, Path) if hint is Path else hint)
    if origin in (list, tuple, Sequence):
        kinds = [one for one in inside if one is not Ellipsis]
        return isinstance(value, (list, tuple)) and all(any(_fits(one, kind) for kind in kinds) for one in value)
    if origin in (dict, Mapping):
        return isinstance(value, Mapping)
    return True


def _words(hint: Any) -> str:
    origin, inside = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return " or ".join(_words(one) for one in inside)
    if origin in (list, tuple, Sequence):
        return f"a list, each {_words(inside[0])}"
    if origin in (dict, Mapping):
        return "a mapping"
    return _WORDS.get(hint, getattr(hint, "__name__", str(hint)))
