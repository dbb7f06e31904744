"""The Python that a command stands for."""

from __future__ import annotations

from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any


class Code(str):
    """Text that is code already."""


def program(*lines: str) -> str:
    """Lines of a program, without the empty ones."""
    return "\n".join(line for line in lines if line)


def call(function: str, *arguments: Any, **named: Any) -> Code:
    """A call; arguments that are None are left out."""
    parts = [literal(value) for value in arguments if value is not None]
    parts += [f"{name}={literal(value)}" for name, value in named.items() if value is not None]
    line = f"{function}({', '.join(parts)})"
    if len(line) <= 88 or len(parts) < 2:
        return Code(line)
    inside = "".join(f"    {part},\n" for part in parts)
    return Code(f"{function}(\n{inside})")


def made(value: Any) -> Code:
    """A dataclass as code, with the attributes that are not the usual ones."""
    given: dict[str, Any] = {}
    for field in fields(value):
        usual = field.default
        if field.default_factory is not MISSING:
            usual = field.default_factory()
        found = getattr(value, field.name)
        if found != usual:
            given[field.name] = dict(found) if isinstance(usual, dict) else found
    first = next(iter(given))
    return call(type(value).__name__, given.pop(first), **given)


def literal(value: Any) -> str:
    """A value as Python writes it."""
    if isinstance(value, Code):
        return str(value)
    return repr(str(value)) if isinstance(value, Path) else repr(value)
