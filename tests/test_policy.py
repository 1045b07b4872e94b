"""Policies: the shipped ones say what they promise, and a faulty one is refused with every fault and its line."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest
import yaml
from pydantic import ValidationError

from autoprec.errors import PolicyError
from autoprec.policy import (
    FAILURE_MODES,
    REMEDIES,
    InitScale,
    Ladder,
    LowerLr,
    Policy,
    Rung,
    load_policy,
    policy_to_yaml,
    shipped_policies,
)

DOCUMENTED = ("normalize_inputs", "clip_gradients", "lower_lr", "init_scale", "bf16", "fp32")
SHIPPED = ("bf16-first", "default", "diagnose-only", "documented", "never-fp32")
# The policies as they lie in the tree; test_wheel.py looks at those that travel.
FOLDER = Path(__file__).parent.parent / "policies"


def write(folder: Path, text: str, name: str = "mine.yaml") -> Path:
    path = folder / name
    path.write_text(dedent(text), encoding="utf-8")
    return path


def faults(source) -> list[str]:
    with pytest.raises(PolicyError) as caught:
        load_policy(source)
    return [line.strip() for line in str(caught.value).splitlines()[1:]]


def remedies(policy: Policy, mode: str) -> tuple[str, ...]:
    return tuple(rung.remedy for rung in policy.ladder(mode).rungs)


# ---- the shipped policies ----


def test_names():
    assert shipped_policies() == SHIPPED


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_policy_names_every_failure_mode(name):
    policy = load_policy(name)
    assert policy.name == name
    assert policy.description
    assert set(policy.ladders) == set(FAILURE_MODES)
    for mode, ladder in policy.ladders.items():
        assert ladder.rungs or ladder.why, mode
        assert {rung.remedy for rung in ladder.rungs} <= set(REMEDIES), mode


@pytest.mark.parametrize(
    "name", ["never_fp32", "never-fp32", str(FOLDER / "never-fp32.yaml"), FOLDER / "never-fp32.yaml"]
)
def test_name_and_path_load_the_same(name):
    assert load_policy(name) == load_policy("never-fp32")


def test_default_is_what_the_schema_says():
    """The file repeats the schema's defaults so that it can be read; whoever changes one changes the other."""
    default = load_policy("default")
    bare = Policy(name="default", description=default.description, ladders=default.ladders)
    assert default == bare

    def keys(content: dict) -> set[str]:
        return {f"{k}.{inner}" for k, v in content.items() for inner in (keys(v) if isinstance(v, dict) else [""])}

    written = yaml.safe_load((FOLDER / "default.yaml").read_text())
    expected = bare.model_dump(mode="json", exclude={"ladders", "name"})
    missing = keys(expected) - keys(written)
    assert not missing, f"write them out in policies/default.yaml, with unit and reason: {missing}"


def test_every_number_in_default_has_its_unit_beside_it():
    settings, _, _ = (FOLDER / "default.yaml").read_text().partition("\nladders:")
    for line in settings.splitlines():
        if re.match(r"\s+\w+: ([\d.\[]|null)", line):
            assert "#" in line, line


def test_default_changes_little_first():
    """Data, then the op, then the training, then the scaler, then the whole precision."""
    rank = {"one_precision_callback": 0, "master_weights": 0, "reset_buffers": 0, "skip_nonfinite_batches": 0,
            "replace_callback": 0, "normalize_inputs": 1, "keep_modules_fp32": 1,
            "loss_fp32": 1, "clip_gradients": 2, "lower_lr": 3, "carry_scale": 4, "init_scale": 5, "bf16": 6,
            "fp32": 7}  # fmt: skip
    default = load_policy("default")
    for mode in FAILURE_MODES:
        ranks = [rank[remedy] for remedy in remedies(default, mode)]
        assert ranks == sorted(ranks), mode


def test_documented_is_the_documented_ladder_everywhere():
    policy = load_policy("documented")
    walked = [mode for mode in FAILURE_MODES if policy.ladder(mode).rungs]
    assert len(walked) == 17
    assert all(remedies(policy, mode) == DOCUMENTED for mode in walked)
    assert all(not rung.parameters for mode in walked for rung in policy.ladder(mode).rungs)
    # All of it stands in the file: whoever reads it needs no other.
    assert set(yaml.safe_load((FOLDER / "documented.yaml").read_text())["ladders"]) == set(FAILURE_MODES)


def test_diagnose_only_tries_nothing():
    policy = load_policy("diagnose-only")
    assert policy.max_attempts == 0
    assert not any(ladder.rungs for ladder in policy.ladders.values())


def test_bf16_first():
    policy = load_policy("bf16-first")
    assert policy.precision.prefer == "bf16"
    assert all(remedies(policy, mode)[0] == "bf16" for mode in FAILURE_MODES if "bf16" in remedies(policy, mode)[:-1])
    assert "bf16" not in remedies(policy, "precision_loss")


def test_never_fp32():
    policy = load_policy("never-fp32")
    assert not policy.remedies.fp32.allow
    for mode in FAILURE_MODES:
        ladder = policy.ladder(mode)
        assert any(policy.settings(rung).allow for rung in ladder.rungs) or ladder.why, (
            f"{mode}: nothing left, and no why"
        )


@pytest.mark.parametrize("name", SHIPPED)
def test_written_and_loaded_again(name):
    policy = load_policy(name)
    text = policy_to_yaml(policy)
    assert load_policy(yaml.safe_load(text)) == policy
    assert Policy.model_validate_json(policy.model_dump_json()) == policy


# ---- what a user may write ----


def test_short_and_long_forms(tmp_path):
    path = write(
        tmp_path,
        """\
        extends: default
        ladders:
          plateau: [bf16, {lower_lr: {factors: [0.1]}}]
          gradient_spike:
            - init_scale: {min: 1e-8, factors: [1, 0.5]}
            - remedy: bf16
              parameters: {native_only: false}
            - fp32:
          fails_in_fp32: {rungs: [], why: nothing helps}
          skipped_steps: {rungs: [carry_scale], why: short}
        """,
    )
    policy = load_policy(str(path))
    assert policy.name == "mine"
    assert policy.description == ""
    assert policy.ladders["plateau"].rungs == (
        Rung(remedy="bf16"),
        Rung(remedy="lower_lr", parameters={"factors": [0.1]}),
    )
    scale, bf16, fp32 = policy.ladders["gradient_spike"].rungs
    assert scale.parameters == {"min": 1e-8, "factors": [1.0, 0.5]}
    assert policy.settings(scale) == InitScale(min=1e-8, factors=(1, 0.5))
    assert (bf16.parameters, fp32.parameters) == ({"native_only": False}, {})
    assert policy.ladders["fails_in_fp32"] == Ladder(why="nothing helps")
    assert policy.ladders["forward_overflow"] == load_policy("default").ladders["forward_overflow"]
    assert load_policy(yaml.safe_load(policy_to_yaml(policy))) == policy
    assert Policy.model_validate_json(policy.model_dump_json()) == policy


def test_extends_lays_sections_over_one_another_and_replaces_ladders_and_lists(tmp_path):
    write(
        tmp_path,
        """\
        extends: never_fp32
        name: ours
        description: for all of us
        limits: {skip_rate: 0.1, progress: 0.05}
        remedies: {lower_lr: {factors: [0.5], floor: 1e-6}}
        ladders: {plateau: [bf16]}
        """,
        "base.yaml",
    )
    (tmp_path / "below").mkdir()
    path = write(
        tmp_path / "below",
        """\
        extends: ../base.yaml
        max_attempts: 3
        limits: {progress: 0.01}
        remedies: {lower_lr: {factors: [0.2, 0.02]}}
        ladders: {plateau: [{lower_lr: {floor: 0.001}}]}
        """,
    )
    policy = load_policy(path)
    assert (policy.name, policy.description, policy.max_attempts) == ("mine", "", 3)
    assert (policy.limits.skip_rate, policy.limits.progress) == (0.1, 0.01)
    assert policy.remedies.lower_lr == LowerLr(factors=(0.2, 0.02), floor=1e-6)
    assert not policy.remedies.fp32.allow
    (rung,) = policy.ladders["plateau"].rungs
    assert policy.settings(rung) == LowerLr(factors=(0.2, 0.02), floor=0.001)


def test_a_policy_and_a_mapping():
    policy = load_policy({"extends": "default", "name": "mine", "remedies": {"fp32": {"allow": False}}})
    assert load_policy(policy) is policy
    assert policy.name == "mine"
    assert load_policy(load_policy("default").model_dump()) == load_policy("default")


def test_rungs_of_a_remedy_that_is_not_allowed_are_no_fault():
    policy = load_policy({"extends": "default", "remedies": {"lower_lr": {"allow": False}}})
    assert remedies(policy, "lr_divergence") == ("lower_lr",)


def test_a_policy_built_by_hand_is_checked_in_the_same_way():
    with pytest.raises(ValidationError, match="value seen 'bf61'; allowed: a remedy"):
        Rung(remedy="bf61")
    with pytest.raises(ValidationError, match=r"factors\.0: Input should be less than 1"):
        Rung(remedy="lower_lr", parameters={"factors": [2.0]})
    with pytest.raises(ValidationError, match="without a why"):
        Ladder()
    with pytest.raises(ValidationError, match=r"min 1, max 0\.5"):
        Policy(name="x", ladders={"plateau": Ladder(rungs=(Rung(remedy="init_scale", parameters={"max": 0.5}),))})


# ---- what is refused ----

# (what stands below `extends: default`, so from line 2 on; the line of the fault; its path; what is said)
REFUSED = {
    "unknown section": ("limit: {}", 2, "limit", "unknown key 'limit'; allowed: .*limits.*; did you mean 'limits'?"),
    "unknown limit": (
        "limits:\n  skip_rte: 1",
        3,
        "limits.skip_rte",
        "unknown key 'skip_rte'; .*did you mean 'skip_rate'?",
    ),
    "above": (
        "limits:\n  progress: 0.1\n  skip_rate: 3",
        4,
        "limits.skip_rate",
        "value seen '3'; allowed: a number from 0 to 1 (share of skipped steps after settling that is still normal)",
    ),
    "below": ("limits: {divergence: 1}", 2, "limits.divergence", "value seen '1'; allowed: a number above 1 (ratio of"),
    "too many": ("probe:\n  steps: 3", 3, "probe.steps", "a whole number from 4 to 10000 (optimizer steps of a leg)"),
    "fraction": ("max_attempts: 2.5", 2, "max_attempts", "value seen '2.5'; allowed: a whole number from 0 to 100"),
    "text": ('limits: {skip_rate: "0.5"}', 2, "limits.skip_rate", "value seen '0.5'; allowed: a number from 0 to 1"),
    "true for a number": ("probe: {steps: yes}", 2, "probe.steps", "value seen 'yes'; allowed: a whole number"),
    "a power": (
        "remedies:\n  init_scale: {max: 2**20}",
        3,
        "remedies.init_scale.max",
        "value seen '2**20'; allowed: a number",
    ),
    "number for true": (
        "remedies: {fp32: {allow: 1}}",
        2,
        "remedies.fp32.allow",
        "value seen '1'; allowed: true or false",
    ),
    "NaN": ("limits: {divergence: .nan}", 2, "limits.divergence", "value seen '.nan'; allowed: a number above 1"),
    "infinity": ("limits: {divergence: .inf}", 2, "limits.divergence", "value seen '.inf'; allowed: a number above 1"),
    "nothing": ("limits:\n  skip_rate:", 3, "limits.skip_rate", "value seen nothing; allowed: a number from 0 to 1"),
    "empty section": ("audit:", 2, "audit", "value seen nothing; allowed: a mapping with the keys ledger_rows"),
    "choice": (
        "precision:\n  prefer: pf16",
        3,
        "precision.prefer",
        "allowed: fp16, bf16 or fp32; did you mean 'fp16'?",
    ),
    "version": ("schema_version: 2", 2, "schema_version", "value seen '2'; allowed: 1"),
    "name": ("name: 3", 2, "name", "value seen '3'; allowed: text"),
    "or null": ("remedies: {clip_gradients: {max_norm: -1}}", 2, "remedies.clip_gradients.max_norm", "above 0 or null"),
    "item": (
        "remedies: {lower_lr: {factors: [0.1, 2]}}",
        2,
        "remedies.lower_lr.factors[1]",
        "value seen '2'; .*below 1",
    ),
    "no item": ("remedies: {lower_lr: {factors: []}}", 2, "remedies.lower_lr.factors", "value seen '[]'; .*not empty"),
    "unknown settings": (
        "remedies:\n  lr: {}\n",
        3,
        "remedies.lr",
        f"unknown key 'lr'; allowed: {', '.join(REMEDIES)}",
    ),
    "min above max": (
        "remedies:\n  init_scale:\n    max: 4\n    min: 8",
        5,
        "remedies.init_scale.min",
        "value seen min 8, max 4; allowed: a min that is not above max",
    ),
    "min above max on a rung": (
        "ladders:\n  plateau:\n  - bf16\n  - init_scale:\n      max: 0.5",
        5,
        "ladders.plateau[1].init_scale.min",
        "value seen min 1, max 0.5; allowed: a min that is not above max",
    ),
    "unknown mode": (
        "ladders:\n  forward_overflw: [bf16]",
        3,
        "ladders.forward_overflw",
        "a failure mode: .*; did you mean 'forward_overflow'?",
    ),
    "unknown remedy": (
        "ladders:\n  plateau:\n    - bf16\n    - lower_rl",
        5,
        "ladders.plateau[1]",
        f"value seen 'lower_rl'; allowed: a remedy: {', '.join(REMEDIES)}; did you mean 'lower_lr'?",
    ),
    "unknown remedy with parameters": (
        "ladders:\n  plateau:\n    - bf_16: {native_only: true}",
        4,
        "ladders.plateau[0]",
        "did you mean 'bf16'?",
    ),
    "unknown parameter": (
        "ladders:\n  plateau:\n    - lower_lr: {factor: [0.1]}",
        4,
        "ladders.plateau[0].lower_lr.factor",
        "unknown key 'factor'; allowed: allow, factors, floor; did you mean 'factors'?",
    ),
    "parameter out of range": (
        "ladders:\n  plateau:\n    - lower_lr:\n        factors: [0.1, 7]",
        5,
        "ladders.plateau[0].lower_lr.factors[1]",
        "value seen '7'; allowed: a number above 0 and below 1",
    ),
    "parameter in the long form": (
        "ladders:\n  plateau:\n    rungs:\n    - remedy: lower_lr\n      parameters:\n        floor: -1",
        7,
        "ladders.plateau.rungs[0].parameters.floor",
        "value seen '-1'; allowed: a number of at least 0|a number at least 0",
    ),
    "parameters not indented": (
        "ladders:\n  plateau:\n    - lower_lr:\n      factors: [0.1]",
        4,
        "ladders.plateau[0]",
        "its parameters below it",
    ),
    "no rung": ("ladders: {plateau: [7]}", 2, "ladders.plateau[0]", "value seen '7'; allowed: a remedy, or one remedy"),
    "no ladder": (
        "ladders: {plateau: bf16}",
        2,
        "ladders.plateau",
        "value seen 'bf16'; allowed: a list of remedies, or",
    ),
    "empty ladder": (
        "ladders:\n  plateau: []",
        3,
        "ladders.plateau",
        "an empty ladder without a why; allowed: a list of",
    ),
    "empty why": ("ladders:\n  plateau: {rungs: [], why: ''}", 3, "ladders.plateau", "an empty ladder without a why"),
    "no ladders": ("ladders:", 2, "ladders", "value seen nothing; allowed: a ladder per failure mode"),
    "given twice": ("audit: {}\nlimits: {}\naudit: {}", 4, "audit", "given twice, first in line 2; allowed: once"),
    "no name": ("? [a]\n: 1", 2, "", "a list as a key; allowed: a name"),
    "no date": ("name: 2020-13-45", 2, "name", "value seen '2020-13-45', which is no timestamp"),
    "python": ("name: !!python/name:os.system x", 2, "name", "which is no "),
    "circle": ("audit: &a [*a]", 2, "audit[0]", "an alias to a part of the file that holds it"),
    "tab": ("limits:\n\tskip_rate: 1", 3, "", "not valid YAML: found character '\\t' that cannot start any token"),
    "unclosed": ("limits: {skip_rate: 1", 3, "", "while parsing a flow mapping that began in line 2"),
    "two documents": ("---\nname: x", 2, "", "not valid YAML: but found another document"),
    "bell": ("name: x\ndescription: \x07", 3, "", "not valid YAML: character '\\x07'"),
}


@pytest.mark.parametrize(("text", "line", "path", "said"), REFUSED.values(), ids=REFUSED)
def test_refused_with_its_line(tmp_path, text, line, path, said):
    file = write(tmp_path, f"extends: default\n{text}\n")
    found = faults(file)
    place = f"{file}:{line}: {path}: " if path else f"{file}:{line}: "
    (fault,) = [fault for fault in found if fault.startswith(place)]
    # ".*" stands for anything, "|" for a choice; everything else is meant as it is written.
    wanted = re.escape(said).replace(r"\.\*", ".*").replace(r"\|", "|")
    assert re.search(wanted, fault), fault


def test_three_faults_at_once(tmp_path):
    path = write(
        tmp_path,
        """\
        extends: default
        limits:
          skip_rate: 20
        ladders:
          forward_overflow:
            - keep_modules_fp32
            - bf61
        remedies:
          lower_lr:
            factor: [0.1]
        """,
    )
    with pytest.raises(PolicyError) as caught:
        load_policy(path)
    assert str(caught.value) == (
        f"cannot use the policy {path}:\n"
        f"  {path}:3: limits.skip_rate: value seen '20'; allowed: a number from 0 to 1 "
        "(share of skipped steps after settling that is still normal)\n"
        f"  {path}:7: ladders.forward_overflow[1]: value seen 'bf61'; allowed: a remedy: {', '.join(REMEDIES)}; "
        "did you mean 'bf16'?\n"
        f"  {path}:10: remedies.lower_lr.factor: unknown key 'factor'; allowed: allow, factors, floor; "
        "did you mean 'factors'?"
    )


def test_a_mapping_has_no_lines():
    (fault,) = faults({"extends": "default", "limits": {"skip_rate": 2}})
    assert fault.startswith("limits.skip_rate: value seen '2'; allowed: a number from 0 to 1 (share of")


def test_a_fault_is_told_once_however_often_it_is_referred_to(tmp_path):
    path = write(
        tmp_path, "extends: default\nladders:\n  plateau: &l [bf61]\n  loss_overflow: *l\n  skipped_steps: *l\n"
    )
    assert len(faults(path)) == 1


def test_without_extends_every_mode_is_needed(tmp_path):
    path = write(tmp_path, "ladders:\n  plateau: [bf16]\n")
    (fault,) = faults(path)
    assert fault == (
        f"{path}:1: ladders: no ladder for nonfinite_data, unnormalized_inputs, invalid_targets and 21 more; "
        "allowed: a ladder for every failure mode, or `extends: default` and only what differs"
    )
    (fault,) = faults({})
    assert fault.startswith("ladders: no ladder for")


def test_a_misspelt_mode_is_not_also_missing(tmp_path):
    text = (FOLDER / "default.yaml").read_text().replace("plateau:", "plateu:")
    (fault,) = faults(write(tmp_path, text))
    assert "did you mean 'plateau'?" in fault


def test_faults_in_what_is_extended_name_that_file(tmp_path):
    below = write(tmp_path, "extends: default\nlimits:\n  skip_rate: 2\n  progress: 2\n", "below.yaml")
    path = write(tmp_path, "extends: below.yaml\nlimits: {progress: 0.1}\nmax_attempts: -1\n")
    first, second = faults(path)
    assert first.startswith(f"{below}:3: limits.skip_rate: value seen '2'")
    assert second.startswith(f"{path}:3: max_attempts: value seen '-1'")


@pytest.mark.parametrize(
    ("extends", "said"),
    [
        ("defualt", "value seen 'defualt'; no such file .*did you mean 'default'?"),
        ("[default]", "value seen '['default']'; allowed: the name of a shipped policy (bf16-first, default,"),
        ("", "value seen nothing; allowed: the name of a shipped policy"),
        (".", "value seen '.'; is a folder"),
        ("mine.yaml", "extends itself (mine.yaml -> mine.yaml)"),
        ("other.yaml", "extends itself (mine.yaml -> other.yaml -> mine.yaml)"),
    ],
)
def test_extending_what_cannot_be_extended(tmp_path, extends, said):
    write(tmp_path, "extends: mine.yaml\n", "other.yaml")
    path = write(tmp_path, f"limits: {{skip_rate: 2}}\nextends: {extends}\n")
    found = faults(path)
    # What was read is still judged; that ladders are missing is not held against it.
    assert any("limits.skip_rate" in fault for fault in found)
    assert len(found) == 2
    assert any(re.search(re.escape(said).replace(r"\.\*", ".*"), fault) and "extends: " in fault for fault in found)


@pytest.mark.parametrize(
    ("content", "line", "said"),
    [
        (b"", 1, "value seen an empty file; allowed: a mapping, such as `extends: default`"),
        (b"# only a comment\n", 1, "value seen an empty file"),
        (b"- bf16\n", 1, "value seen a list"),
        (b"default\n", 1, "value seen a value, 'default'; allowed: a mapping"),
        (b"extends: default\nname: \xff\n", 2, "not text in UTF-8 (byte 0xff)"),
    ],
)
def test_a_file_that_holds_no_policy(tmp_path, content, line, said):
    path = tmp_path / "mine.yaml"
    path.write_bytes(content)
    (fault,) = faults(path)
    assert fault.startswith(f"{path}:{line}: {said}")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("defualt", "value seen 'defualt'; no such file .*; did you mean 'default'?"),
        ("policies/never_fp23.yaml", "no such file .*; did you mean 'never-fp32'?"),
        (Path("default"), "value seen 'default'; no such file .*did you mean 'default'?"),
        ("nothing-like-it", "(bf16-first, default, diagnose-only, documented, never-fp32)$"),
        (".", "value seen '.'; is a folder"),
        (3, "value seen 3; allowed: the name of a shipped policy (bf16-first,"),
        (None, "value seen None"),
    ],
)
def test_no_such_policy(tmp_path, monkeypatch, source, said):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PolicyError) as caught:
        load_policy(source)
    assert re.search(re.escape(said).replace(r"\.\*", ".*").replace(r"\$", "$"), str(caught.value)), caught.value


def test_a_policy_is_read_without_torch():
    code = (
        "import sys; from autoprec.policy import load_policy, policy_to_yaml; policy_to_yaml(load_policy('default'));"
        "print(sorted({'torch', 'fastai', 'optuna', 'typer'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
