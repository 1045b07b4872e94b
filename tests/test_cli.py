from __future__ import annotations

import subprocess
import sys
from types import ModuleType
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner, Result

from autoprec import __version__, doctor
from autoprec.audit.events import Note
from autoprec.audit.journal import Journal
from autoprec.cli import app
from autoprec.diagnosis.rules import RULES

if TYPE_CHECKING:
    from pathlib import Path

COMMANDS: dict[str, set[str]] = {
    "": {"--version", "--help"},
    "demo": {"--help"},
    "report": {"--run", "--help"},
    "explain": {"--help"},
    "doctor": {"--help"},
    "version": {"--help"},
    "policy": {"--help"},
    "policy check": {"--help"},
    "policy show": {"--help"},
}


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), prog_name="autoprec")


@pytest.fixture
def audit(tmp_path: Path) -> Path:
    path = tmp_path / "audit.jsonl"
    for run_id in ("first", "second"):
        with Journal(path, run_id) as journal:
            journal.write("note", Note(text=f"said by the {run_id}"))
    return path


@pytest.mark.parametrize("command", COMMANDS)
def test_every_help_has_an_example_and_frozen_flags(command: str) -> None:
    result = call(*command.split(), "--help")
    assert result.exit_code == 0
    assert "Example:\n    autoprec " in result.output
    flags = {word.strip(",") for word in result.output.split() if word.startswith("--") and len(word) > 2}
    flags -= {"--run"} - COMMANDS[command]  # it stands in an example
    assert flags == COMMANDS[command], (
        "Scripts rely on these. Add a new one here and to the README; keep an old one working under its name."
    )


def test_the_commands_are_frozen() -> None:
    known = {c.callback.__name__ for c in app.registered_commands if c.callback}
    assert known == {c for c in COMMANDS if c and " " not in c} - {"policy"}
    assert "Exit codes:" in call("--help").output


@pytest.mark.parametrize("arguments", [["nonsense"], ["report"], ["report", "a", "b"], ["--nonsense"], ["policy", "x"]])
def test_wrong_usage_is_2(arguments: list[str]) -> None:
    result = call(*arguments)
    assert result.exit_code == 2
    assert "Error" in result.stderr or "Usage" in result.stderr


@pytest.mark.parametrize("arguments", [["version"], ["--version"]])
def test_version(arguments: list[str]) -> None:
    result = call(*arguments)
    assert (result.exit_code, result.output) == (0, f"autoprec {__version__}\n")


def test_report_shows_the_last_run_and_names_the_others(audit: Path) -> None:
    result = call("report", str(audit))
    assert result.exit_code == 0
    assert "said by the second" in result.stdout
    assert "said by the first" not in result.stdout
    assert "The file holds 2 runs. The others (--run ID): first" in result.stderr


def test_report_shows_the_run_asked_for(audit: Path) -> None:
    result = call("report", str(audit), "--run", "first")
    assert "said by the first" in result.stdout
    result = call("report", str(audit), "--run", "third")
    assert result.exit_code == 2
    assert "no run 'third'; its runs are first, second" in result.stderr


def test_report_says_that_a_line_was_cut(audit: Path) -> None:
    audit.write_bytes(audit.read_bytes()[:-5])
    result = call("report", str(audit), "--run", "first")
    assert result.exit_code == 0
    assert "A line was cut off" in result.stderr


@pytest.mark.parametrize("make", [None, b"no audit", b"\xff\xfe"])
def test_report_of_an_unreadable_file_is_one_clean_message(tmp_path: Path, make: bytes | None) -> None:
    path = tmp_path / "x.jsonl"
    if make is not None:
        path.write_bytes(make)
    result = call("report", str(path))
    assert result.exit_code == 2
    assert result.stdout == ""
    assert str(path) in result.stderr
    assert "Traceback" not in result.stderr


def test_report_does_not_load_torch(audit: Path) -> None:
    code = (
        "import sys\n"
        "from autoprec.cli import main\n"
        "try:\n"
        "    main()\n"
        "except SystemExit as e:\n"
        "    assert not e.code, e.code\n"
        "heavy = {'torch', 'fastai', 'optuna', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, "report", str(audit)], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "said by the second" in done.stdout


def test_explain_lists_every_mode() -> None:
    result = call("explain")
    assert result.exit_code == 0
    listed = {line.split(" ")[0] for line in result.stdout.splitlines()} - {""}
    assert listed == {rule.mode for rule in RULES}


@pytest.mark.parametrize("mode", [rule.mode for rule in RULES])
def test_explain_a_mode(mode: str) -> None:
    result = call("explain", mode)
    assert result.exit_code == 0
    assert result.stdout.startswith(mode)
    doc = next(rule.doc for rule in RULES if rule.mode == mode)
    assert result.stdout.split()[1:] == doc.split()


def test_explain_did_you_mean() -> None:
    result = call("explain", "forward_overflw")
    assert result.exit_code == 2
    assert "There is no failure mode 'forward_overflw'. Did you mean forward_overflow?" in result.stderr
    assert "`autoprec explain` lists them" in call("explain", "qqq").stderr


def test_policy_show_and_check_agree(tmp_path: Path) -> None:
    shown = call("policy", "show")
    assert shown.exit_code == 0
    own = tmp_path / "own.yaml"
    own.write_text(shown.stdout, encoding="utf-8")
    checked = call("policy", "check", str(own), "default")
    assert checked.exit_code == 0, checked.stderr
    assert checked.stdout == f"{own}: fine\ndefault: fine\n"


def test_policy_faults_are_1_and_a_missing_file_is_2(tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text("name: bad\nmax_attemts: 3\n", encoding="utf-8")
    result = call("policy", "check", str(bad), "default")
    assert result.exit_code == 1
    assert "max_attemts" in result.stderr
    assert result.stdout == "default: fine\n"
    assert call("policy", "show", str(bad)).exit_code == 1
    assert call("policy", "check", str(tmp_path / "none.yaml")).exit_code == 2
    assert call("policy", "show", "defalt").exit_code == 2


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("limited", 0), ("broken", 1)])
def test_doctor(monkeypatch: pytest.MonkeyPatch, status: str, code: int) -> None:
    found = doctor.Check(name="torch", status=status, says="2.6 [native]")  # type: ignore[arg-type]
    monkeypatch.setattr(doctor, "diagnose_machine", lambda: (found,))
    result = call("doctor")
    assert result.exit_code == code
    assert result.stdout.split() == ["torch", status, "2.6", "[native]"]


@pytest.mark.parametrize(
    ("version", "numbers"),
    [("2.6.0", (2, 6, 0)), ("2.6.0+cu121", (2, 6, 0)), ("2.7.0a0+git", (2, 7, 0)), ("2.8rc1", (2, 8)), ("", ())],
)
def test_versions_are_compared_as_numbers(version: str, numbers: tuple[int, ...]) -> None:
    assert doctor._numbers(version) == numbers


def test_doctor_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)  # importing it now raises
    check = doctor._package("optuna")
    assert check.status == "broken"
    assert "Install optuna>=4.0" in check.says
    monkeypatch.setattr(doctor.metadata, "version", lambda name: "0.1")
    assert doctor._package("fastai").says == "0.1; autoprec needs 2.8.9 or later"


@pytest.mark.parametrize(("returned", "code"), [(None, 0), (0, 0), (1, 1)])
def test_demo_passes_its_result_on(monkeypatch: pytest.MonkeyPatch, returned: int | None, code: int) -> None:
    module = ModuleType("autoprec.demo")
    module.main = lambda: returned  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "autoprec.demo", module)
    assert call("demo").exit_code == code
