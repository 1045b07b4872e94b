"""The examples, README's snippets and the demo do what they say; what the examples return loads without autoprec."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import learners  # first: it silences fastai's import
import pytest
import torch

from autoprec import demo
from autoprec.diagnosis.rules import RULES

thread_left_alone = learners.thread_left_alone
pytestmark = [
    *learners.FASTAI_WARNINGS,
    # what fastai.vision and fastai.tabular import
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:FutureWarning"),
    # fastai's MixedPrecision, which a learner repaired in fp16 comes back with, where there is no CUDA
    pytest.mark.filterwarnings("ignore:.*CUDA is not available:UserWarning"),
]

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)

# name: (finding, part of its place, part of the change)
EXAMPLES = {
    "digits": ("unnormalized_inputs", "digits.py", "batch transform"),
    "tabular_timestamp": ("unnormalized_inputs", "layers.0.0", "tabular Normalize"),
}

ELSEWHERE = """
import sys, warnings
warnings.simplefilter("ignore")
sys.modules["autoprec"] = None
import torch
torch.set_num_threads(1)
from fastai.vision.all import load_learner
learn = load_learner("learn.pkl")
with learn.no_bar():
    torch.save(learn.get_preds(dl=learn.dls.test_dl(torch.load("rows", weights_only=False)))[0], "there")
"""


@pytest.fixture(autouse=True)
def quiet(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_repaired_and_its_export_loads_without_autoprec(name, tmp_path, capsys):
    mode, place, change = EXAMPLES[name]
    ran = runpy.run_path(str(ROOT / "examples" / f"{name}.py"))
    learn = ran["learn"]
    outcome = learn.autoprec
    assert (outcome.result, outcome.precision, outcome.diagnosis.primary.mode) == ("repaired", "fp16", mode)
    assert place in str(outcome.diagnosis.primary.where)
    assert [change in c.what for c in outcome.changes] == [True]
    assert learn.recorder.values[-1][2] > 0.93
    assert outcome.explain() in capsys.readouterr().out
    assert Path(outcome.audit_path).exists()

    rows = ran["table"].iloc[:50] if name == "tabular_timestamp" else ran["items"][:50]
    with learn.no_bar():
        here = learn.get_preds(dl=learn.dls.test_dl(rows))[0]
    learn.path = tmp_path
    learn.export("learn.pkl")
    torch.save(rows, "rows")
    done = subprocess.run([sys.executable, "-c", ELSEWHERE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert torch.equal(torch.load("there"), here)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_short(name):
    assert len((ROOT / "examples" / f"{name}.py").read_text().splitlines()) < 40


def test_readme_snippets_run(capsys):
    names: dict[str, object] = {}
    for code in SNIPPETS:
        exec(compile(code, "README.md", "exec"), names)
    assert "precision_unavailable" in capsys.readouterr().out or torch.cuda.is_available()


def test_readme_names_every_failure_mode_as_its_rule_does():
    table = re.findall(r"^\| `(\w+)` \| (.*) \|$", README.split("## Failure modes")[1], re.MULTILINE)
    assert table == [(rule.mode, rule.doc.strip().splitlines()[0]) for rule in RULES]


def test_readme_names_every_shipped_policy():
    assert {p.stem for p in (ROOT / "policies").glob("*.yaml")} <= set(re.findall(r"^\| `([\w-]+)` \|", README, re.M))


@pytest.mark.long
def test_the_demo_repairs_its_run(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert demo.main() == 0
    shown = capsys.readouterr().out
    assert "unnormalized_inputs" in shown
    assert "scores = q @ k.transpose(1, 2)" in shown
    line = next(line for line in shown.splitlines() if "read it" in line)
    assert Path(line.split()[-1]).exists()


@pytest.mark.long
def test_the_demo_fails_where_the_repair_is_no_better_than_fp32_allows(monkeypatch, capsys):
    monkeypatch.setattr(demo, "_TOLERANCE", -1.0)
    monkeypatch.setattr(demo, "_EPOCHS", 2)
    assert demo.main() == 1
    assert "did not go as it should" in capsys.readouterr().out


def gpu(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )


@pytest.fixture
def case(tmp_path) -> Path:
    folder = tmp_path / "cases"
    folder.mkdir()
    (folder / "raw.py").write_text(
        f"import sys\nsys.path.insert(0, {str(ROOT / 'tests')!r})\n"
        "from learners import KINDS\nLR, EPOCHS = 1e-2, 1\n"
        "def make_learner(seed):\n    return KINDS['mlp'].make()\n"
    )
    return folder


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without CUDA")
def test_the_gpu_benchmark_says_that_there_is_no_gpu(case):
    done = gpu("--verdicts", case)
    assert done.returncode == 2
    assert "No CUDA device here" in done.stdout


@pytest.mark.long
def test_the_gpu_benchmark_compares(case):
    done = gpu("--verdicts", case, "--dry-run", "--jobs", "1")
    assert done.returncode == 0, done.stderr
    assert "2 runs: same verdict 2" in done.stdout
