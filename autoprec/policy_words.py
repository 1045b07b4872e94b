"""Saying in words what is wrong with a policy: the value seen, what is allowed, what was probably meant.

What is allowed is read off the schema (as JSON schema), so that a message cannot disagree with the check.
"""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pydantic import BaseModel, ValidationError

    from autoprec.policy_yaml import Fault, Node

__all__ = ["Loc", "closest", "listed", "meant", "quoted", "refusals", "steps_to"]

Loc = tuple["str | int", ...]
"""Keys and indices that lead to a value."""


def refusals(error: ValidationError, model: type[BaseModel], root: Node) -> list[Fault]:
    """What pydantic refused, in words and with places.

    Args:
        error: the refusal of `root.plain()`.
        model: what it was to become.
        root: the tree that was refused.
    """
    return list(_refusals(error.errors(include_url=False), model, (), root))


def _refusals(errors: Sequence[Mapping[str, Any]], model: type[BaseModel], prefix: Loc, root: Node) -> Iterator[Fault]:
    schema = model.model_json_schema()
    places = {tuple(error["loc"]) for error in errors}
    for error in errors:
        loc, told = tuple(error["loc"]), error.get("ctx", {})
        if any(place[: len(loc)] == loc and len(place) > len(loc) for place in places if loc):
            continue  # a list that is refused only because its items are
        if "errors" in told:  # a part that was checked by a model of its own
            yield from _refusals(told["errors"], told["model"], prefix + loc, root)
            continue
        if loc[-1:] == ("[key]",):  # so pydantic says that the key itself is at fault
            loc = loc[:-1]
        loc += tuple(told.get("at", ()))
        node, beyond = root.child(prefix + loc)
        seen = "" if beyond else node.seen() or ""
        what = f"value seen {quoted(seen) if seen else 'nothing'}"
        if error["type"] == "extra_forbidden":
            options = tuple(_at(schema, loc[:-1]).get("properties", ()))
            seen = str(loc[-1])
            what, allowed = f"unknown key {quoted(seen)}", listed(options, seen)
        elif "allowed" in told:
            options = told.get("options", ())
            seen, what, allowed = told["seen"].strip("'"), f"value seen {told['seen']}", told["allowed"]
        else:
            here = _at(schema, loc)
            options = tuple(map(str, here.get("enum", ())))
            allowed = _words(here, schema)
        near = closest(seen, options)
        yield node.fault(f"{what}; allowed: {allowed}{meant(near)}", beyond)


def _at(schema: dict[str, Any], loc: Loc) -> dict[str, Any]:
    """The part of a JSON schema that describes the value at `loc`; empty if it does not say."""
    here = schema
    for step in loc:
        options = [*here.get("anyOf", ()), here]
        inside = [_deref(option, schema) for option in options]
        key = "items" if isinstance(step, int) else "additionalProperties"
        found = [o.get("properties", {}).get(step) or o.get(key) for o in inside]
        here = next((f for f in found if isinstance(f, dict)), {})
    return here | _deref(here, schema)


def _deref(here: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    if "$ref" not in here:
        return here
    found: dict[str, Any] = schema["$defs"][here["$ref"].rpartition("/")[2]]
    return found


def _words(here: dict[str, Any], schema: dict[str, Any]) -> str:
    """What a JSON schema allows, as one says it, with the unit if the field's documentation begins with one."""
    said = _type_words(here, schema)
    if not said.startswith(("a number", "a whole number")) or "description" not in here:
        return said
    meaning = re.split(r"[;:]|\.\s|\.$", " ".join(here["description"].split()))[0]
    return f"{said} ({meaning[:1].lower() if meaning[1:2].islower() else meaning[:1]}{meaning[1:]})"


def _type_words(here: dict[str, Any], schema: dict[str, Any]) -> str:
    here = here | _deref(here, schema)
    if "in_words" in here:
        return str(here["in_words"])
    if "enum" in here or "const" in here:
        *most, last = map(str, here.get("enum", [here.get("const")]))
        return f"{', '.join(most)} or {last}" if most else last
    if "anyOf" in here:
        return " or ".join(_type_words(option, schema) for option in here["anyOf"])
    keys = ", ".join(here.get("properties", ()))
    keys = ", ".join(here.get("properties", ()))
    item = _type_words(here["items"], schema) if "items" in here else "a value"
    simple = {
        "array": f"a list{' that is not empty' if 'minItems' in here else ''}, each item {item}",
        "object": f"a mapping with the keys {keys}" if keys else "a mapping",
        "integer": f"a whole number{_bounds(here)}",
        "number": f"a number{_bounds(here)}",
        "boolean": "true or false",
        "null": "null",
        "string": "text",
    }
    return simple.get(str(here.get("type")), "another value")


def _bounds(here: dict[str, Any]) -> str:
    if "minimum" in here and "maximum" in here:
        return f" from {here['minimum']:g} to {here['maximum']:g}"
    names = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}
    said = [f"{word} {here[name]:g}" for name, word in names.items() if name in here]
    return " " + " and ".join(said) if said else ""


def closest(seen: str, options: Sequence[str]) -> list[str]:
    """The options that were most likely meant, best first."""
    return difflib.get_close_matches(seen.lower().replace("-", "_"), options, 3) or difflib.get_close_matches(
        seen, options, 3
    )


def listed(options: Sequence[str], seen: str) -> str:
    """The options; of very many only the closest, where some are close."""
    near = closest(seen, options)
    if len(options) > 14 and near:
        return f"{', '.join(near)}, … ({len(options)} in all)"
    return ", ".join(options)


def steps_to(path: Loc) -> str:
    """A path as one writes it, `ladders.plateau[1].bf16`."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).removeprefix(".")


def meant(options: Sequence[str]) -> str:
    """The question that ends a message, if anything comes close."""
    return f"; did you mean {options[0]!r}?" if options else ""


def quoted(text: str) -> str:
    """A value on one line, cut if it is long."""
    text = " ".join(text.split())
    return f"'{text[:57]}...'" if len(text) > 60 else f"'{text}'"
