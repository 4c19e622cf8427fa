"""What JSON that somebody else may have written must look like, and where it does not."""

from __future__ import annotations

from typing import Any

Shape = Any
"""``None``, a text or a type that JSON has; a function that says whether a value fits; a tuple of shapes one of which
fits; ``[shape]`` for a list; ``{str: shape}`` for a mapping of any names; ``{"name": shape}`` for an object, where
``name?`` may be missing and other names hold what they will."""


def number(value: object) -> bool:
    """Whether it is a number that can be computed with: neither NaN nor infinite, nor one that no float can hold."""
    return type(value) in (int, float) and abs(value) < 1e300  # type: ignore[arg-type]


def size(value: object) -> bool:
    """Whether it is a number from 0 that a time or a ratio of times can be."""
    return type(value) in (int, float) and 0 <= value < 1e18  # type: ignore[operator]


def count(value: object) -> bool:
    """Whether it is a whole number from 0; a seed has 64 bits."""
    return type(value) is int and 0 <= value < 2**64


def length(value: object) -> bool:
    """Whether it is a whole number that so many tokens in one step can be."""
    return type(value) is int and 0 <= value < 2**20


def misfit(value: object, shape: Shape, where: str = "") -> str | None:
    """Where a value parts from its shape (``configs[0].gamma``, or ``where`` itself); ``None`` if it nowhere does."""
    if isinstance(shape, tuple):
        places = [misfit(value, each, where) for each in shape]
        return None if None in places else max(map(str, places), key=len)
    if isinstance(shape, list):
        if not isinstance(value, list):
            return where
        places = [misfit(each, shape[0], f"{where}[{i}]") for i, each in enumerate(value)]
        return next(filter(None, places), None)
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            return where
        if str in shape:
            places = [misfit(each, shape[str], f"{where}[{name!r}]") for name, each in value.items()]
            return next(filter(None, places), None)
        for name, inner in shape.items():
            key = name.removesuffix("?")
            place = f"{where}.{key}" if where else key
            if key in value:
                if (found := misfit(value[key], inner, place)) is not None:
                    return found
            elif key == name:
                return place
        return None
    if shape is None or isinstance(shape, str):
        return None if value == shape else where
    if isinstance(shape, type):
        return None if type(value) is shape else where
    return None if shape(value) else where


def not_json(constant: str) -> None:
    """For ``json.loads(..., parse_constant=not_json)``: NaN and the infinities, which Python takes, are no JSON."""
    raise ValueError(f"{constant} is no JSON.")
