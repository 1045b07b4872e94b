"""The benchmark over a folder of cases, on two of its own: one healthy, one whose product overflows in half."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

CASES = Path(__file__).parents[1] / "benchmarks" / "cases.py"

HEAD = """
import torch
from fastai.basics import *
from torch.utils.data import TensorDataset

LR, EPOCHS, HEALTHY_BELOW, HAS_FIX = 0.01, 1, {below}, {has_fix}


class Net(nn.Module):
    def __init__(self, fixed):
        super().__init__()
        self.fixed, self.body, self.head = fixed, nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, x):
        h = self.body(x).relu()
        {line}
        return self.head(h)


def make_learner(seed=0, fixed=False):
    torch.manual_seed(seed)
    x = torch.randn(16 * 16 + 32, 8)
    y = (x @ torch.randn(8, 3)).argmax(1)
    parts = [DataLoader(TensorDataset(a, b), bs=16) for a, b in ((x[:-32], y[:-32]), (x[-32:], y[-32:]))]
    return Learner(DataLoaders(*parts), Net(fixed), loss_func=CrossEntropyLossFlat())
"""

EXPECTED = """
overflowing: {modes: [forward_overflow], repair: settings, keeps16: true}
well: {modes: [], repair: none, keeps16: true}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "well.py").write_text(HEAD.format(line="pass", below=1.2, has_fix=False))
    product = "h = h if self.fixed else h * 1e5 / 1e5"
    (tmp_path / "overflowing.py").write_text(HEAD.format(line=product, below=1.2, has_fix=True))
    (tmp_path / "expected.yaml").write_text(EXPECTED)
    (tmp_path / "lines.yaml").write_text('overflowing: "h * 1e5 / 1e5"\n')
    return tmp_path


@pytest.mark.long
def test_two_cases_with_controls(folder: Path) -> None:
    out = folder / "rows.json"
    command = [sys.executable, str(CASES), str(folder), "--jobs", "1", "--controls", "--distance", "--json", str(out)]
    command += ["--lines", str(folder / "lines.yaml"), "--at-least", "2"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | {"COLUMNS": "220"})
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "2 of 2 runs count: mode right 2, line right 1 of 1, end right 2, all of it 2" in ran.stdout
    bad, well = json.loads(out.read_text())
    assert (bad["mode"], bad["result"], bad["precision"], bad["ran_in"]) == (
        "forward_overflow", "repaired", "fp16", "fp16",
    )  # fmt: skip
    assert bad["claims"]["fp16"]["healthy"] is False
    assert bad["claims"]["fp32"]["healthy"] is True
    assert bad["distance"]["ours"] < bad["distance"]["bf16"]
    assert set(bad["controls"]) == {
        "stock fp16", "always bf16", "always fp32", "ladder, until the loss is finite", "autoprec, documented",
    }  # fmt: skip
    assert bad["controls"]["always fp32"]["ran_in"] == "fp32"
    assert (well["mode"], well["result"], well["as_stock"]) == (None, "healthy", True)


@pytest.fixture(scope="module")
def cases() -> ModuleType:
    spec = importlib.util.spec_from_file_location("cases_under_test", CASES)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


ROW = {
    "mode": "forward_overflow", "result": "repaired", "healthy": True, "ran_in": "fp16", "precision": "fp16",
    "changes": ["kept in fp32"], "line": "h = a @ b", "module": "layers.0", "because": "column 2 of batch 9",
}  # fmt: skip
CURABLE = {"modes": ["forward_overflow"], "repair": "settings"}
HEALTHY = {"modes": [], "repair": "none"}


@pytest.mark.parametrize(
    ("changed", "want", "mode", "end"),
    [
        ({}, CURABLE, True, True),
        ({"mode": "plateau"}, CURABLE, False, True),
        ({"result": "healthy"}, CURABLE, True, False),
        ({"healthy": False}, CURABLE, True, False),
        ({"ran_in": "fp32"}, CURABLE, True, False),
        ({"result": "unrepaired", "healthy": False}, {**CURABLE, "repair": "user"}, True, True),
        ({"mode": None, "result": "healthy", "changes": []}, HEALTHY, True, True),
        ({"mode": None, "result": "healthy", "changes": [], "as_stock": False}, HEALTHY, True, False),
        ({"mode": None, "result": "healthy"}, HEALTHY, True, False),
        ({"error": "ValueError"}, CURABLE, False, False),
    ],
)
def test_score(cases: ModuleType, changed: dict[str, Any], want: dict[str, Any], mode: bool, end: bool) -> None:
    assert cases.score({**ROW, **changed}, want) == (mode, end)


@pytest.mark.parametrize(
    ("true", "right"),
    [
        (None, None),
        ("a @ b", True),
        ("a * b", False),
        (["a * b", "a @ b"], True),
        ({"module": "layers.0"}, True),
        ({"module": "layers.1"}, False),
        ({"says": ["column 2", "batch 9"]}, True),
        ({"says": ["column 2", "batch 8"]}, False),
    ],
)
def test_right_place(cases: ModuleType, true: Any, right: bool | None) -> None:
    assert cases.right_place(ROW, true) is right
    assert not cases.right_place({**ROW, "line": None, "module": None, "because": None}, true)


def test_every_case_with_a_line_is_spelled_as_text_module_or_sentence(cases: ModuleType) -> None:
    for true in cases.read_yaml(CASES.with_name("case_lines.yaml")).values():
        assert isinstance(true, str | list) or set(true) in ({"module"}, {"says"})
