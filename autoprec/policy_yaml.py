"""Reading a policy's YAML so that every fault can be told with the line it stands in.

A document becomes a tree of `Node`s. Each remembers where it was written, so that `extends` can lay one
document over another, and short forms can be spelled out, without a value losing its place. What pydantic then
refuses is looked up in the tree and said in words by `policy_words`.

`load_policy` in `autoprec.policy` is the way in. Pure: imports no torch, no fastai.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import BaseModel

from autoprec.errors import PolicyError
from autoprec.policy_words import Loc, closest, meant, quoted, steps_to

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

__all__ = ["Document", "Fault", "Node", "in_order", "open_document", "shipped", "spelled_out", "written"]


@dataclass(frozen=True)
class Node:
    """A value and where it was written."""

    value: Any
    """A scalar, a dict of nodes, or a list of nodes."""
    path: Loc = ()
    """Keys and indices from the top of the document, as it was written."""
    file: str = ""
    """Empty where the policy came from a mapping."""
    line: int = 0
    """Counts from 1; of the key, for a value that has one."""
    column: int = 0
    text: str | None = None
    """The scalar as it was written; None for mappings and lists."""

    def plain(self) -> Any:
        """The value without the places."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        if isinstance(self.value, list):
            return [node.plain() for node in self.value]
        return self.value

    def seen(self) -> str | None:
        """The value as an error message shows it; None if nothing was written."""
        if self.value is None:
            return None
        return self.text if self.text is not None else str(self.plain())

    def child(self, loc: Loc) -> tuple[Node, Loc]:
        """The deepest node on the way to `loc`, and the steps that lead on from there to nothing."""
        node = self
        for i, step in enumerate(loc):
            inside = node.value
            known = range(len(inside)) if isinstance(inside, list) else inside if isinstance(inside, dict) else ()
            if step not in known:
                return node, loc[i:]
            node = inside[step]
        return node, ()

    def fault(self, text: str, beyond: Loc = ()) -> Fault:
        """A fault at this place."""
        return Fault(self.file, self.line, self.column, steps_to(self.path + beyond), text)


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong, and where."""

    file: str
    line: int
    column: int
    path: str
    text: str

    def __str__(self) -> str:
        parts = (f"{self.file}:{self.line}" if self.file else "", self.path, self.text)
        return ": ".join(part for part in parts if part)


@dataclass(frozen=True)
class Document:
    """A policy as it was written, with everything that it extends laid underneath."""

    root: Node
    title: str
    """What an error calls it."""
    name: str
    """Its name where it does not state one."""
    faults: list[Fault]
    complete: bool
    """False if something that it extends could not be read, so that what is missing says nothing."""


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, which reads 1e-8 as the number that YAML 1.2 makes of it and PyYAML does not."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


# ---- finding ----


def shipped() -> dict[str, Traversable]:
    """The policies that come with autoprec, by name, sorted."""
    folder = resources.files("autoprec").joinpath("policies")
    if not folder.is_dir():
        # In a source checkout they lie at the top of the tree; building the wheel moves them into the package.
        folder = Path(__file__).parent.parent / "policies"
    names = sorted(file.name for file in folder.iterdir() if file.name.endswith(".yaml"))
    return {name.removesuffix(".yaml"): folder.joinpath(name) for name in names}


def _find(source: str | os.PathLike[str], folder: Path) -> Traversable | str:
    """The file that `source` means, or what is wrong with it."""
    known = shipped()
    if isinstance(source, str) and source.replace("_", "-") in known:
        return known[source.replace("_", "-")]
    path = folder / Path(source).expanduser()
    if path.is_file():
        return path
    problem = "is a folder" if path.is_dir() else "no such file"
    near = closest(Path(source).stem.replace("_", "-"), tuple(known))
    return (
        f"value seen {quoted(os.fspath(source))}; {problem} ({path.absolute()}); "
        f"allowed: the path of a YAML file, or the name of a shipped policy ({', '.join(known)}){meant(near)}"
    )


# ---- reading ----


def open_document(source: str | os.PathLike[str] | Mapping[str, Any]) -> Document:
    """Read a policy and what it extends, without judging its values.

    Raises:
        PolicyError: there is nothing to judge: no such file, no YAML, no mapping.
    """
    faults: list[Fault] = []
    chain: tuple[str, ...] = ()
    if isinstance(source, Mapping):
        title, name, folder = "given as a mapping", "unnamed", Path()
        root: Node | None = _from_plain(source, ())
    else:
        file = _find(source, Path())
        if isinstance(file, str):
            raise PolicyError(f"cannot use the policy: {file}")
        title, name, folder, chain = str(file), Path(file.name).stem, Path(str(file)).parent, (_identity(file),)
        root = _read(file, faults)
    if root is None:
        raise PolicyError(f"cannot use the policy {title}:\n  " + "\n  ".join(map(str, faults)))
    whole = _extended(root, folder, chain, faults)
    return Document(whole or _without(root, "extends"), title, name, faults, complete=whole is not None)


def _from_plain(value: Any, path: Loc) -> Node:
    if isinstance(value, BaseModel):
        value = value.model_dump()
    if isinstance(value, Mapping):
        return Node({str(key): _from_plain(item, (*path, str(key))) for key, item in value.items()}, path)
    if isinstance(value, list | tuple):
        return Node([_from_plain(item, (*path, i)) for i, item in enumerate(value)], path)
    return Node(value, path, text=str(value))


def _read(file: Traversable, faults: list[Fault]) -> Node | None:
    """The document's tree; None, with the fault noted, where there is no mapping to look into."""
    where = str(file)
    try:
        text = file.read_bytes().decode("utf-8-sig")
        loader = _Loader(text)
        top = loader.get_single_node()
    except OSError as error:
        faults.append(Fault(where, 1, 0, "", f"cannot be read: {error.strerror}"))
        return None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        faults.append(Fault(where, line, 0, "", f"not text in UTF-8 (byte {error.object[error.start]:#04x})"))
        return None
    except yaml.YAMLError as error:
        faults.append(_syntax(error, where, text))
        return None
    if not isinstance(top, yaml.MappingNode):
        seen = "an empty file" if top is None else f"a {_kind(top)}, {quoted(str(top.value))}"
        allowed = "a mapping, such as `extends: default` and below it what differs"
        faults.append(Fault(where, 1, 0, "", f"value seen {seen}; allowed: {allowed}"))
        return None
    return _Tree(loader, where, faults).build(top, Node(None, file=where, line=1), ())


def _kind(node: yaml.Node) -> str:
    return (
        "list" if isinstance(node, yaml.SequenceNode) else "mapping" if isinstance(node, yaml.MappingNode) else "value"
    )


def _syntax(error: yaml.YAMLError, where: str, text: str) -> Fault:
    if isinstance(error, yaml.MarkedYAMLError):
        mark = error.problem_mark or error.context_mark
        begun = f"{error.context} that began in line {error.context_mark.line + 1}" if error.context_mark else None
        what = ", ".join(part for part in (error.problem, begun or error.context) if part)
        return Fault(where, mark.line + 1 if mark else 1, 0, "", f"not valid YAML: {what}")
    position = getattr(error, "position", 0)  # a ReaderError: a character that YAML forbids
    return Fault(where, text[:position].count("\n") + 1, 0, "", f"not valid YAML: character {text[position]!r}")


class _Tree:
    """Turns yaml's nodes into ours, noting faults that only the text shows: keys given twice, unreadable values."""

    def __init__(self, loader: _Loader, file: str, faults: list[Fault]) -> None:
        self.loader, self.file, self.faults = loader, file, faults

    def build(self, node: yaml.Node, place: Node, inside: tuple[yaml.Node, ...]) -> Node:
        """The node at `place`; `inside` are the nodes around it."""
        if node in inside:
            self.faults.append(place.fault("an alias to a part of the file that holds it; allowed: values that end"))
            return place
        around = (*inside, node)
        if isinstance(node, yaml.MappingNode):
            return replace(place, value=self._mapping(node, place, around))
        if isinstance(node, yaml.SequenceNode):
            items = enumerate(node.value)
            return replace(
                place, value=[self.build(item, self._at(item, (*place.path, i)), around) for i, item in items]
            )
        return self._scalar(node, place)

    def _at(self, node: yaml.Node, path: Loc) -> Node:
        return Node(None, path, self.file, node.start_mark.line + 1, node.start_mark.column)

    def _mapping(self, node: yaml.MappingNode, place: Node, around: tuple[yaml.Node, ...]) -> dict[str, Node]:
        built: dict[str, Node] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                self.faults.append(self._at(key, place.path).fault(f"a {_kind(key)} as a key; allowed: a name"))
                continue
            at = self._at(key, (*place.path, key.value))
            if key.value in built:
                self.faults.append(at.fault(f"given twice, first in line {built[key.value].line}; allowed: once"))
                continue
            built[key.value] = self.build(value, at, around)
        return built

    def _scalar(self, node: yaml.Node, place: Node) -> Node:
        try:
            value = self.loader.construct_object(node)
        except (yaml.YAMLError, ValueError):
            problem = f"value seen {quoted(str(node.value))}, which is no {node.tag.rpartition(':')[2]}"
            self.faults.append(place.fault(f"{problem}; allowed: plain YAML values"))
            value = node.value
        return replace(place, value=value, text=str(node.value))


# ---- extending ----


def _extended(root: Node, folder: Path, chain: tuple[str, ...], faults: list[Fault]) -> Node | None:
    """The tree laid over what it extends; None, with the fault noted, if that cannot be read."""
    if "extends" not in root.value:
        return root
    at, rest = root.value["extends"], _without(root, "extends")
    file = _find(at.value, folder) if isinstance(at.value, str) else _not_a_name(at)
    if isinstance(file, str):
        faults.append(at.fault(file))
        return None
    if _identity(file) in chain:
        names = " -> ".join(Path(name).name for name in (*chain, _identity(file)))
        faults.append(at.fault(f"extends itself ({names}); allowed: a policy that does not come back to this one"))
        return None
    below = _read(file, faults)
    whole = below and _extended(below, Path(str(file)).parent, (*chain, _identity(file)), faults)
    # Its name and description are its own: this policy is another one.
    return _merged(_without(whole, "name", "description"), rest) if whole else None


def _not_a_name(at: Node) -> str:
    seen = "nothing" if at.value is None else quoted(at.seen() or "")
    return f"value seen {seen}; allowed: the name of a shipped policy ({', '.join(shipped())}), or a path"


def _identity(file: Traversable) -> str:
    return str(Path(str(file)).resolve())


def _without(root: Node, *keys: str) -> Node:
    return replace(root, value={key: node for key, node in root.value.items() if key not in keys})


def _merged(base: Node, over: Node) -> Node:
    """`over` laid over `base`, mapping by mapping; lists and single values are replaced, and so is a whole ladder."""
    if not (isinstance(base.value, dict) and isinstance(over.value, dict)):
        return over
    lay: Callable[[Node, Node], Node] = (lambda _, node: node) if over.path == ("ladders",) else _merged
    both = {key: lay(base.value[key], node) if key in base.value else node for key, node in over.value.items()}
    return replace(over, value=base.value | both)


def in_order(faults: list[Fault]) -> list[Fault]:
    """The faults as one meets them in the file; one that an alias puts into many places is told once."""
    once: dict[object, Fault] = {}
    for fault in faults:
        once.setdefault((fault.file, fault.line, fault.column, fault.text) if fault.file else fault, fault)
    return sorted(once.values(), key=lambda fault: (fault.file, fault.line, fault.column))


# ---- short forms ----


def spelled_out(root: Node) -> Node:
    """The tree with every ladder in its long form."""
    ladders = root.value.get("ladders")
    if ladders is None or not isinstance(ladders.value, dict):
        return root
    long = {mode: _long_ladder(ladder) for mode, ladder in ladders.value.items()}
    return replace(root, value=root.value | {"ladders": replace(ladders, value=long)})


def _long_ladder(ladder: Node) -> Node:
    if isinstance(ladder.value, list):
        ladder = replace(ladder, value={"rungs": ladder})
    rungs = ladder.value.get("rungs") if isinstance(ladder.value, dict) else None
    if rungs is None or not isinstance(rungs.value, list):
        return ladder
    rungs = replace(rungs, value=[_long_rung(rung) for rung in rungs.value])
    return replace(ladder, value=ladder.value | {"rungs": rungs})


def _long_rung(rung: Node) -> Node:
    if isinstance(rung.value, str):
        return replace(rung, value={"remedy": rung})
    if not isinstance(rung.value, dict) or "remedy" in rung.value:
        return rung
    if len(rung.value) != 1:  # parameters that are not indented, most likely: no rung, whatever the keys
        return replace(rung, value=str(rung.plain()), text=str(rung.plain()))
    ((name, parameters),) = rung.value.items()
    remedy = replace(parameters, value=name, text=name, path=rung.path)
    return replace(rung, value={"remedy": remedy} | ({} if parameters.value is None else {"parameters": parameters}))


def written(content: dict[str, Any]) -> str:
    """A policy's content as YAML, with its ladders in short form."""
    short = {mode: _short_ladder(ladder) for mode, ladder in content["ladders"].items()}
    return yaml.dump(content | {"ladders": short}, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


def _short_ladder(ladder: dict[str, Any]) -> list[Any] | dict[str, Any]:
    rungs = [{rung["remedy"]: rung["parameters"]} if rung["parameters"] else rung["remedy"] for rung in ladder["rungs"]]
    return rungs if ladder["why"] is None else {"rungs": rungs, "why": ladder["why"]}


class _Dumper(yaml.SafeDumper):
    """Lists on one line, mappings below one another."""


_Dumper.add_representer(
    list, lambda dumper, items: dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=True)
)
