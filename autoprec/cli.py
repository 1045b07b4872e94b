"""The command line. Every command is a few lines over a public function; what it prints is made elsewhere."""

from __future__ import annotations

import difflib
import io
import re
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from autoprec import __version__
from autoprec.errors import AutoprecError, PolicyError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rich.console import RenderableType

__all__ = ["app", "main"]

_NOT_WELL = 1
_UNUSABLE = 2
_FILE = "models/autoprec/20260314T150926535Z-0a1b2c.jsonl"
_WIDEST = 100  # columns: beyond it, lines of prose are hard to follow

_EXIT_CODES = """

\b
Exit codes:
  0  all is well
  1  what was looked at is not: an invalid policy, a run that was not
     repaired, a machine on which autoprec cannot work
  2  the command could not be carried out: wrong usage, unreadable file
"""


def _example(*lines: str) -> str:
    """The end of a help page. The backspace keeps the lines below it from being filled into a paragraph."""
    return "\n".join(["\b", "Example:", *(f"  {line}" for line in lines)])


# No rich help: it would fill the examples into paragraphs all the same.
app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
policy_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
app.add_typer(policy_app, name="policy")


def main() -> None:
    """The console entry point."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A pipe or an old terminal may not know a character of the user's own code; that is no reason to fail.
            stream.reconfigure(errors="backslashreplace")
    app(prog_name="autoprec")


@contextmanager
def _clean(code: int = _UNUSABLE) -> Iterator[None]:
    """Our own errors as their text on standard error, without a traceback."""
    try:
        yield
    except AutoprecError as e:
        _complain(str(e))
        raise typer.Exit(code) from e


def _complain(text: str) -> None:
    typer.echo(text, err=True)


def _show(what: RenderableType) -> None:
    console = Console(highlight=False)
    console.width = min(console.width, _WIDEST)
    console.print(what)


def _version(value: bool) -> None:  # noqa: FBT001 - the shape of a typer callback
    if value:
        typer.echo(f"autoprec {__version__}")
        raise typer.Exit


@app.callback(epilog=_example("autoprec demo", f"autoprec report {_FILE}") + _EXIT_CODES)
def _top(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Mixed-precision training for fastai that finds out why it fails, and repairs it."""


@app.command(epilog=_example("autoprec demo"))
def demo() -> None:
    """See a run fail, be diagnosed and be repaired.

    Takes about a minute, needs neither a GPU nor a network.
    """
    from autoprec.demo import main as run_demo

    with _clean(_NOT_WELL):
        code = run_demo()
    raise typer.Exit(code or 0)


@app.command(
    epilog=_example(f"autoprec report {_FILE}", "autoprec report audit.jsonl --run 20260314T150926535Z-0a1b2c")
)
def report(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="An audit file (.jsonl).", show_default=False)],
    run: Annotated[
        str | None, typer.Option("--run", metavar="ID", help="Which run of the file. Default: the last.")
    ] = None,
) -> None:
    """Print what an audit file says about a run.

    What was wrong, how we know, what was tried and changed, the result, and what could not be checked.
    """
    from autoprec.audit.journal import read_audit
    from autoprec.audit.report import fold
    from autoprec.audit.terminal import render

    with _clean():
        audit = read_audit(file)
        last = audit.of(audit.runs[-1]) if audit.runs else ()
        chosen = last if run is None else read_audit(file, run).events
        _show(render(fold(chosen), file))
    if len(audit.runs) > 1:
        others = [r for r in audit.runs if r != chosen[0].run_id]
        _complain(f"\nThe file holds {len(audit.runs)} runs. The others (--run ID): {', '.join(others)}")
    if audit.torn:
        _complain("\nA line was cut off while it was being written, and is left out.")


@policy_app.callback(epilog=_example("autoprec policy check my_policy.yaml", "autoprec policy show default"))
def _policy() -> None:
    """Check and show policies.

    A policy says what autoprec may change, in which order, and from which number on it calls something a fault.
    """


@policy_app.command(epilog=_example("autoprec policy check my_policy.yaml policies/*.yaml"))
def check(
    files: Annotated[
        list[str], typer.Argument(metavar="FILE...", help="Policy files, or names of shipped ones.", show_default=False)
    ],
) -> None:
    """Check policies; every fault is named with its line."""
    from autoprec.policy import load_policy

    code = 0
    for file in files:
        fault: PolicyError | None = None
        try:
            load_policy(file)
        except PolicyError as e:
            fault = e
        if fault is None:
            typer.echo(f"{file}: fine")
        else:
            _complain(str(fault))
            code = max(code, _NOT_WELL if _policy_exists(file) else _UNUSABLE)
    raise typer.Exit(code)


@policy_app.command(epilog=_example("autoprec policy show default > my_policy.yaml"))
def show(
    policy: Annotated[str, typer.Argument(metavar="NAME_OR_FILE", help="A shipped policy or a file.")] = "default",
) -> None:
    """Print a whole policy as YAML, defaults included.

    A good start for a policy of your own.
    """
    from autoprec.policy import load_policy, policy_to_yaml

    with _clean(_NOT_WELL if _policy_exists(policy) else _UNUSABLE):
        typer.echo(policy_to_yaml(load_policy(policy)).rstrip("\n"))


def _policy_exists(name: str) -> bool:
    from autoprec.policy import shipped_policies

    return name in shipped_policies() or Path(name).is_file()


@app.command(epilog=_example("autoprec explain", "autoprec explain forward_overflow"))
def explain(
    mode: Annotated[
        str | None,
        typer.Argument(metavar="MODE", help="A failure mode. Default: list all.", show_default=False),
    ] = None,
) -> None:
    """Explain a failure mode, or list all.

    What it looks like, and what looks alike but is something else.
    """
    from autoprec.diagnosis.rules import RULES

    docs = {rule.mode: rule.doc.strip() for rule in RULES}
    if mode is None:
        _show(_two_columns(((name, doc.split("\n", 1)[0]) for name, doc in docs.items()), style="bold"))
    elif mode in docs:
        _show(Group(Text(mode, style="bold"), *_prose(docs[mode])))
    else:
        near = difflib.get_close_matches(mode, docs, n=1)
        hint = f"Did you mean {near[0]}?" if near else "`autoprec explain` lists them."
        _complain(f"There is no failure mode {mode!r}. {hint}")
        raise typer.Exit(_UNUSABLE)


def _prose(doc: str) -> Iterator[RenderableType]:
    """A docstring, filled to the terminal's width; `Looks like   ...` gets two columns and wraps in the second."""
    for paragraph in doc.split("\n\n"):
        yield Text()
        lines = paragraph.splitlines()
        if re.match(r"\S.*?\s{2,}\S", lines[0]):
            joined = re.sub(r"\n +", " ", paragraph)
            yield _two_columns((_halves(line) for line in joined.splitlines()), style="dim")
        else:
            # An indented paragraph is code and stays as it is.
            yield Text(paragraph if lines[0].startswith(" ") else " ".join(lines))


def _halves(line: str) -> tuple[str, str]:
    left, _, right = line.partition("  ")
    return left, right.strip()


def _two_columns(rows: Iterable[tuple[str, str]], style: str) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style=style)
    for left, right in rows:
        table.add_row(Text(left), Text(right))
    return table


@app.command(epilog=_example("autoprec doctor"))
def doctor() -> None:
    """Look at what this machine can do.

    Versions, the GPU, bf16 native or emulated, 16 bits on the CPU: what will work here and what will not.
    """
    from autoprec.doctor import diagnose_machine

    styles = {"ok": "green", "limited": "yellow", "broken": "bold red"}
    checks = diagnose_machine()
    table = Table.grid(padding=(0, 2, 0, 0))
    for found in checks:
        table.add_row(Text(found.name, style="bold"), Text(found.status, style=styles[found.status]), Text(found.says))
    _show(table)
    raise typer.Exit(_NOT_WELL if any(c.status == "broken" for c in checks) else 0)


@app.command(epilog=_example("autoprec version"))
def version() -> None:
    """Print the version."""
    typer.echo(f"autoprec {__version__}")
