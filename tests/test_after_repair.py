"""What a user does with a learner after an island repair is right: everything fastai offers, computed finite."""

from __future__ import annotations

import math
import warnings
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
import torch
from learners import FASTAI_WARNINGS, attention, seed_all, thread_left_alone  # noqa: F401  # the fixture is autouse
from torch import nn

import autoprec

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # fastai's own imports
    from fastai.data.block import CategoryBlock, DataBlock
    from fastai.data.transforms import RandomSplitter
    from fastai.learner import Learner
    from fastai.vision.core import PILImageBW
    from fastai.vision.data import ImageBlock

mpl.use("Agg")
pytestmark = [*FASTAI_WARNINGS, pytest.mark.filterwarnings("ignore::DeprecationWarning")]  # fastai on numpy 2


class Products(nn.Module):
    """Squares of pixel sums pass 65504 in half; a norm follows."""

    def __init__(self) -> None:
        super().__init__()
        self.sum, self.norm, self.head = nn.Conv2d(1, 4, 3, padding=1), nn.LayerNorm(4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        f = self.sum(x * 400).flatten(2)
        return self.head(self.norm((f @ f.transpose(1, 2)).sum(2)))


def images() -> Learner:
    """Digit-like images through fastai's whole image pipeline."""
    seed_all()
    pixels = (np.random.rand(160, 8, 8) * 255).astype("uint8")
    pixels[::2, :, :4] = 0
    block = DataBlock(
        blocks=(ImageBlock(PILImageBW), CategoryBlock(vocab=[0, 1])),
        get_x=lambda i: PILImageBW.create(pixels[i]),
        get_y=lambda i: int(i) % 2,
        splitter=RandomSplitter(0.2, seed=0),
    )
    dls = block.dataloaders(list(range(len(pixels))), bs=16, num_workers=0, device="cpu")
    return Learner(dls, Products(), loss_func=nn.CrossEntropyLoss(), metrics=[])


def repaired(learn: Learner, tmp_path: Any) -> Learner:
    with learn.no_bar(), learn.no_logging():
        autoprec.fit_safely(learn.to_fp16(), 1, 3e-3, emulate_cuda=True, audit=tmp_path / "a.jsonl")
    outcome = learn.autoprec
    assert (outcome.result, outcome.precision) == ("repaired", "fp16")
    assert outcome.diagnosis.primary.mode == "forward_overflow"
    assert outcome.islands
    return learn


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.chdir(tmp_path)  # lr_find saves a model below the working directory


@pytest.fixture
def learn(tmp_path: Any) -> Learner:
    return repaired(images(), tmp_path)


def test_the_island_is_the_line_of_the_product(learn: Learner) -> None:
    (island,) = learn.autoprec.islands
    line = learn.autoprec.diagnosis.primary.where.source
    assert "f @ f.transpose(1, 2)" in line
    assert island.endswith("in forward")


def test_validate_and_predictions_are_finite(learn: Learner) -> None:
    with learn.no_bar(), learn.no_logging():
        (loss,) = learn.validate()
        predictions, targets = learn.get_preds()
    assert math.isfinite(loss)
    assert torch.isfinite(predictions).all()
    assert float(nn.functional.cross_entropy(predictions, targets)) == pytest.approx(loss, rel=1e-5)


def test_show_results_shows(learn: Learner) -> None:
    with learn.no_bar():
        learn.show_results(max_n=4)


def test_lr_find_finds(learn: Learner) -> None:
    with learn.no_bar(), learn.no_logging():
        found = learn.lr_find(num_it=20, show_plot=False)
    assert all(math.isfinite(loss) for loss in learn.recorder.losses)
    assert found


def test_a_stock_fit_goes_on_in_fp32(learn: Learner) -> None:
    with learn.no_bar(), learn.no_logging():
        learn.fit(1, 1e-3)
    assert not torch.is_autocast_enabled("cpu")
    assert math.isfinite(learn.recorder.values[-1][1])


def test_the_next_safe_fit_goes_on_in_fp16_with_the_island(learn: Learner, tmp_path: Any) -> None:
    before = learn.autoprec.islands
    with learn.no_bar(), learn.no_logging():
        outcome = autoprec.run(learn, 1, 1e-3, emulate_cuda=True, audit=tmp_path / "b.jsonl")
    assert (outcome.result, outcome.precision, outcome.islands) == ("healthy", "fp16", before)
    assert outcome.changes == ()


def test_another_model_in_the_learner_starts_without_the_island(learn: Learner, tmp_path: Any) -> None:
    learn.model = nn.Sequential(nn.Flatten(), nn.Linear(64, 2))
    learn.opt = None
    with learn.no_bar(), learn.no_logging():
        outcome = autoprec.run(learn, 1, 1e-3, emulate_cuda=True, audit=tmp_path / "b.jsonl")
    assert (outcome.result, outcome.islands) == ("healthy", ())


def test_bare_fp16_is_found_and_repaired_again(tmp_path: Any) -> None:
    learn = repaired(attention(), tmp_path).to_fp16()
    with learn.no_bar(), learn.no_logging():
        outcome = autoprec.run(learn, 1, 3e-3, emulate_cuda=True, audit=tmp_path / "b.jsonl")
    assert (outcome.result, outcome.precision) == ("repaired", "fp16")
