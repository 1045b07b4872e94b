"""What comes back exports and loads where autoprec cannot be imported, and predicts the same there."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path

import learners  # first: it silences fastai's import
import pytest
import torch
from learners import KINDS

import autoprec

thread_left_alone = learners.thread_left_alone
pytestmark = learners.FASTAI_WARNINGS

# What is left in the learner after each: nothing, fastai's callbacks, no callback, a batch transform.
NAMES = {
    "mlp": ("healthy", "fp16", ()),
    "double_unscale": ("repaired", "bf16", ("bf16",)),
    "attention": ("repaired", "fp16", ("keep_modules_fp32",)),
    "gram": ("repaired", "fp16", ("loss_fp32",)),
    "raw_inputs": ("repaired", "fp16", ("normalize_inputs",)),
}

ELSEWHERE = """
import sys, warnings
warnings.simplefilter("ignore")

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "autoprec":
            raise ImportError("autoprec is not installed here")

sys.meta_path.insert(0, Blocked())
import torch
torch.set_num_threads(1)
from pathlib import Path
import learners
from fastai.learner import load_learner

folder = Path(sys.argv[1])
for file in sorted(folder.glob("*.pkl")):
    learn = load_learner(file)
    learn.create_mbar = False
    rows = torch.load(folder / f"{file.stem}.rows", weights_only=True)
    dl = learn.dls.loaders[0].new(learners.Rows(*rows), bs=8)
    torch.save(learn.get_preds(dl=dl)[0], folder / f"{file.stem}.there")
assert "autoprec" not in sys.modules
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Every learner trained, exported, and asked for predictions here and in a process without autoprec."""
    folder = tmp_path_factory.mktemp("exports")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as there: sums in another order differ in their last bits
    for name, (result, precision, remedies) in NAMES.items():
        kind = KINDS[name]
        learn = kind.learner()
        learn.path = folder
        outcome = autoprec.run(
            learn, kind.epochs, kind.lr, schedule="fit", emulate_cuda=True, audit=folder / f"{name}.jsonl"
        )  # fmt: skip
        assert (outcome.result, outcome.precision) == (result, precision)
        assert tuple(c.remedy for c in outcome.changes) == remedies
        rows = learn.dls.valid.dataset.tensors
        torch.save(list(rows), folder / f"{name}.rows")
        with warnings.catch_warnings():
            # fastai's callback says on a CPU that it does nothing there; the same holds in the other process
            warnings.filterwarnings("ignore", ".*CUDA.*")
            learn.export(f"{name}.pkl")
            torch.save(learn.get_preds(dl=learn.dls.valid)[0], folder / f"{name}.here")
    environment = {**os.environ, "PYTHONPATH": str(Path(learners.__file__).parent), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, str(folder)], env=environment, cwd=folder, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    torch.set_num_threads(threads)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_other_process_really_has_no_autoprec():
    code = ELSEWHERE.split("import torch", maxsplit=1)[0] + "import autoprec"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert "autoprec is not installed here" in done.stderr


@pytest.mark.parametrize("name", NAMES)
def test_an_export_predicts_the_same_without_autoprec(name, folder):
    here, there = (torch.load(folder / f"{name}.{where}", weights_only=True) for where in ("here", "there"))
    assert here.shape[0] == len(KINDS[name].learner().dls.valid.dataset)
    assert torch.isfinite(there).all()
    assert torch.equal(here, there)


def test_the_predictions_are_not_all_alike(folder):
    for name in NAMES:
        there = torch.load(folder / f"{name}.there", weights_only=True)
        assert there.flatten(1).std(0).max() > 1e-3


def test_normalized_inputs_are_part_of_the_export(folder):
    """Without the transform the net, trained on inputs of size 1, would see 1e5."""
    there = torch.load(folder / "raw_inputs.there", weights_only=True)
    y = torch.load(folder / "raw_inputs.rows", weights_only=True)[1]
    assert (there.argmax(1) == y).float().mean() > 0.7
