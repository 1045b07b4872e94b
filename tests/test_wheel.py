"""The wheel holds what it needs: every shipped policy loads from an installed copy, far from the source tree."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from autoprec.policy import FAILURE_MODES

ROOT = Path(__file__).parent.parent
CODE = """
import json
import autoprec
from autoprec.policy import load_policy, shipped_policies
print(json.dumps([autoprec.__file__, {name: len(load_policy(name).ladders) for name in shipped_policies()}]))
"""


def run(*command: str | Path, **kwargs) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, **kwargs)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    built, target = tmp_path_factory.mktemp("built"), tmp_path_factory.mktemp("installed")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", built, ROOT)
    (wheel,) = built.glob("autoprec-*.whl")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-cache-dir")
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", "--no-compile", "--target", target, wheel)
    return target


def test_every_shipped_policy_loads_from_the_wheel(installed, tmp_path):
    # PYTHONPATH comes before the editable install's entry; the printed path proves which copy answered.
    environment = os.environ | {"PYTHONPATH": str(installed)}
    where, ladders = json.loads(run(sys.executable, "-c", CODE, cwd=tmp_path, env=environment))
    assert Path(where).is_relative_to(installed)
    assert sorted(ladders) == sorted(path.stem for path in (ROOT / "policies").glob("*.yaml"))
    assert set(ladders.values()) == {len(FAILURE_MODES)}


def test_the_wheel_holds_nothing_of_the_tree_around_the_package(installed):
    top = {path.name for path in installed.iterdir() if not path.name.endswith(".dist-info")}
    assert top <= {"autoprec", "bin"}
