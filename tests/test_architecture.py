"""The shape of the package: who imports whom, what is registered, which names are frozen.

Read from the source, not run, but for one interpreter in which the pure modules are imported.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import autoprec
from autoprec.diagnosis import RULES
from autoprec.policy import FAILURE_MODES, REMEDIES, Limits, load_policy, shipped_policies

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGE = Path(autoprec.__file__).parent
TESTS = Path(__file__).parent
HEAVY = ("torch", "fastai", "optuna", "typer")
PURE = ("evidence", "policy", "policy_yaml", "policy_words", "planner", "verify", "ledger", "errors", "outcome", "noun",
        "words", "diagnosis", "audit")  # fmt: skip
PURE_TESTS = ("test_evidence.py", "test_ledger.py", "test_verify.py", "test_planner.py", "test_outcome.py",
              "test_architecture.py", "diagnosis/test_rules.py", "diagnosis/test_finding.py")  # fmt: skip


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def sources(*parts: str) -> list[Path]:
    """The source files of the package, or of these modules and subpackages."""
    roots = [PACKAGE / part for part in parts] or [PACKAGE]
    found = [f for root in roots for f in (root.rglob("*.py") if root.is_dir() else [root.with_suffix(".py")])]
    assert found, f"no source in {parts}"
    return sorted(found)


def relative(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def imported(path: Path) -> Iterator[tuple[str, int]]:
    """(full name, line) of everything imported anywhere in a file, for type checkers or not, late or not."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{relative(path)}:{node.lineno}: imports here are absolute"
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def of(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def run_time_imports(path: Path) -> Iterator[tuple[str, int]]:
    """Those that are not for type checkers only."""
    for_checkers = {
        id(inner)
        for node in ast.walk(tree(path))
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree(path)):
        if id(node) not in for_checkers and isinstance(node, ast.Import | ast.ImportFrom):
            prefix = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            yield from ((prefix + alias.name, node.lineno) for alias in node.names)


# ---- who imports whom ----


@pytest.mark.parametrize("path", sources(*PURE), ids=relative)
def test_pure_modules_import_nothing_heavy(path: Path) -> None:
    for name, line in run_time_imports(path):
        assert not of(name, *HEAVY), f"{relative(path)}:{line} imports {name}; it must be readable without"


def test_each_pure_module_can_be_imported_first_and_brings_in_nothing_heavy() -> None:
    # One interpreter, the package thrown out in between: a module may be the first that a program imports.
    code = f"""
import importlib, sys
sys.path.insert(0, {str(PACKAGE.parent)!r})
for first in {["", *PURE]}:
    for name in [n for n in sys.modules if n == "autoprec" or n.startswith("autoprec.")]:
        del sys.modules[name]
    importlib.import_module("autoprec." + first if first else "autoprec")
    heavy = [n for n in {HEAVY} if n in sys.modules]
    assert not heavy, f"importing autoprec.{{first}} brings in {{heavy}}"
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_tests_of_pure_modules_are_pure() -> None:
    code = f"""
import importlib, sys
sys.path[:0] = {[str(PACKAGE.parent), str(TESTS), str(TESTS / "diagnosis")]}
for name in {[Path(name).stem for name in PURE_TESTS]}:
    importlib.import_module(name)
heavy = [n for n in {HEAVY} if n in sys.modules]
assert not heavy, f"these tests bring in {{heavy}}"
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for path in map(TESTS.joinpath, PURE_TESTS):
        assert not [name for name, _ in imported(path) if of(name, *HEAVY)], path


@pytest.mark.parametrize(("package", "other"), [("diagnosis", "remedies"), ("remedies", "diagnosis")])
def test_rules_and_remedies_meet_in_the_policy_only(package: str, other: str) -> None:
    for path in sources(package):
        for name, line in imported(path):
            assert not of(name, f"autoprec.{other}"), (
                f"{relative(path)}:{line} imports {name}: let the policy join them"
            )


@pytest.mark.parametrize(
    ("library", "allowed"),
    [
        ("optuna", {"search.py"}),
        ("typer", {"cli.py"}),
        ("rich", {"audit/terminal.py", "cli.py", "demo.py"}),
        ("loguru", {"logs.py"}),
    ],
)
def test_a_library_has_its_place(library: str, allowed: set[str]) -> None:
    using = {relative(path) for path in sources() if any(of(name, library) for name, _ in imported(path))}
    assert using <= allowed, f"{library} belongs in {sorted(allowed)} only"


# ---- the registries ----


def modules(folder: str) -> list[str]:
    """What stands in an open folder: one file per thing, helpers (`_name`, `base`) aside."""
    return [f.stem for f in sources(folder) if f.parent == PACKAGE / folder and f.stem != "base" and f.stem[0] != "_"]


def test_every_rule_is_registered() -> None:
    modes = [rule.mode for rule in RULES]
    assert len(set(modes)) == len(modes)
    assert set(modes) == set(modules("diagnosis/rules")), (
        "a rule's mode is its file's name; put its RULE into diagnosis/rules/__init__.py, at the place of its cause"
    )
    assert set(modes) <= set(FAILURE_MODES), "a new failure mode is named in policy.FAILURE_MODES"
    for rule in RULES:
        assert import_module(f"autoprec.diagnosis.rules.{rule.mode}").RULE is rule


def test_a_rule_names_evidence_that_exists() -> None:
    from autoprec.evidence import Evidence

    for rule in RULES:
        assert rule.needs, rule.mode
        for need in rule.needs:
            assert need.startswith("leg:") or need in Evidence.model_fields, f"{rule.mode} needs {need}"


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.mode)
def test_a_rule_explains_itself(rule) -> None:
    assert rule.doc == import_module(f"autoprec.diagnosis.rules.{rule.mode}").__doc__
    assert re.search(r"^Looks like   \S", rule.doc, re.M), "say what it looks like"
    assert re.search(r"^Not this     \S", rule.doc, re.M), "say what it is taken for, and is not"
    named = set(re.findall(r"`([a-z0-9_]+)`", rule.doc.split("Not this")[1])) & set(modules("diagnosis/rules"))
    assert rule.mode not in named, "a rule is no look-alike of itself"


def named_in(path: Path) -> tuple[str | None, str | None]:
    """The remedy's name and its class, from a module of remedies/."""
    for cls in (node for node in tree(path).body if isinstance(node, ast.ClassDef)):
        for line in (node for node in cls.body if isinstance(node, ast.Assign)):
            if ast.unparse(line.targets[0]) == "name":
                return ast.literal_eval(line.value), cls.name
    return None, None


@pytest.mark.parametrize("name", modules("remedies"))
def test_every_remedy_is_registered(name: str) -> None:
    path = PACKAGE / "remedies" / f"{name}.py"
    stated, cls = named_in(path)
    assert stated == name, "a remedy's name is its file's name"
    assert name in REMEDIES, "a remedy has its settings in policy.Remedies"
    registry = next(
        node for node in tree(PACKAGE / "remedies/__init__.py").body
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "REMEDIES"
    )  # fmt: skip
    made = [ast.unparse(node.func) for node in ast.walk(registry) if isinstance(node, ast.Call)]
    assert made.count(cls) == 1, f"put {cls}() into remedies/__init__.py"
    assert re.search(r"^Cures        \S", ast.get_docstring(tree(path)) or "", re.M), "say what it cures"


@pytest.mark.parametrize("policy", shipped_policies())
def test_every_failure_mode_has_a_ladder(policy: str) -> None:
    ladders = load_policy(policy).ladders
    assert set(ladders) == set(FAILURE_MODES), "every shipped policy has a ladder for every failure mode"
    for mode, ladder in ladders.items():
        assert ladder.rungs or (ladder.why or "").strip(), f"{mode}: an empty ladder says why"


def test_every_limit_is_used() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in sources() if path.name != "policy.py")
    unused = {name for name in Limits.model_fields if not re.search(rf"\blimits\.{name}\b", text)}
    assert not unused, "a limit that nothing reads: use it, or take it out of the policy"


# ---- what outsiders rely on ----


PUBLIC = {
    "AuditError", "AutoPrecisionLearner", "AutoprecError", "Diagnosis", "Finding", "InputError", "Outcome", "Policy",
    "PolicyError", "RestoreError", "UnrepairedError", "diagnose", "enable_logging", "fit_safely", "load_policy",
    "read_audit", "run",
}  # fmt: skip
MODES = {
    "autocast_dtype_error", "duplicate_precision_callbacks", "fails_in_fp32", "forward_overflow",
    "forward_underflow", "gradient_explosion", "gradient_overflow", "gradient_spike", "gradient_underflow",
    "half_precision_weights", "invalid_targets", "loss_overflow", "loss_underflow", "lr_divergence", "no_gradient",
    "nonfinite_data", "nonfinite_metric", "nonfinite_parameters", "plateau", "poisoned_buffers", "precision_loss",
    "precision_unavailable", "scaler_misuse", "skipped_steps", "unnormalized_inputs",
}  # fmt: skip
RUNGS = {
    "bf16", "carry_scale", "clip_gradients", "fp32", "init_scale", "keep_modules_fp32", "loss_fp32", "lower_lr",
    "master_weights", "normalize_inputs", "one_precision_callback", "replace_callback", "reset_buffers",
    "skip_nonfinite_batches",
}  # fmt: skip


def test_the_public_names_are_frozen() -> None:
    assert set(autoprec.__all__) == PUBLIC, (
        "Users import these. A new name: add it here and to the README's list. A name that goes: keep it for a release "
        "with a warning, and say so in CHANGELOG.md."
    )


def test_the_failure_modes_are_frozen() -> None:
    assert set(FAILURE_MODES) == MODES, (
        "Policies and audit files out there hold these names. A new one: add it here, a rule with its table, a ladder "
        "in every shipped policy. A name that changes breaks users' policies: raise the policy's schema_version."
    )


def test_the_remedies_are_frozen() -> None:
    assert set(REMEDIES) == RUNGS, (
        "Policies and audit files out there hold these names. A new one: add it here, a module in remedies/ with its "
        "test. A name that changes breaks users' policies: raise the policy's schema_version."
    )


def test_public_names_are_sorted_and_each_has_a_home() -> None:
    assert autoprec.__all__ == sorted(autoprec.__all__)
    assert set(autoprec._HOMES) == set(autoprec.__all__)
    assert set(autoprec.__all__) <= set(dir(autoprec))
    for name, home in autoprec._HOMES.items():
        path = PACKAGE / (home.removeprefix("autoprec.").replace(".", "/") + ".py")
        assert name in exported(path), f"{home}.__all__ lacks {name}"
        assert name in defined(path), f"{home} does not define {name}"
        if home.removeprefix("autoprec.").split(".")[0] in PURE:
            assert getattr(autoprec, name) is getattr(import_module(home), name)


def exported(path: Path) -> list[str]:
    for node in tree(path).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    return []


def defined(path: Path) -> set[str]:
    names: set[str] = set()
    for node in tree(path).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {ast.unparse(target) for target in node.targets}
        elif isinstance(node, ast.AnnAssign):
            names.add(ast.unparse(node.target))
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def test_a_name_that_does_not_exist_is_refused() -> None:
    with pytest.raises(AttributeError, match="module 'autoprec' has no attribute 'fit_safley'"):
        autoprec.fit_safley  # noqa: B018


def test_no_public_name_is_a_module_too() -> None:
    # `import autoprec.run` would put the module where the function is.
    files = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert not files & set(autoprec.__all__)


# ---- what no source says ----


# Absolute paths of a machine, and folders that do not travel with the package.
FOREIGN = re.compile(r"(?<![\w.])/(?:work|home|root|mnt|Users)/|shared/cases")


@pytest.mark.parametrize("path", sources(), ids=relative)
def test_no_source_names_a_place_of_ours(path: Path) -> None:
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        assert not re.search(FOREIGN, text), f"{relative(path)}:{number}: {text.strip()}"


@pytest.mark.parametrize("path", sources(), ids=relative)
def test_the_library_does_not_print(path: Path) -> None:
    if relative(path) in ("cli.py", "demo.py"):
        return
    for node in ast.walk(tree(path)):
        called = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id
        assert called != "print", f"{relative(path)}:{node.lineno} prints: write an event, logs.py says it"
        assert not isinstance(node, ast.Assert), f"{relative(path)}:{node.lineno} asserts: raise one of errors.py"
