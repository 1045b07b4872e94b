"""Normalized inputs: the statistics against numpy in float64, and who gets them."""

from __future__ import annotations

import math
import warnings

import learners  # first: it silences fastai's import
import numpy as np
import pytest
import torch
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.data.transforms import IntToFloatTensor, Normalize
from fastai.torch_core import TensorImage
from torch import nn
from torch.utils.data import TensorDataset

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import pandas as pd
    from fastai.tabular.all import Categorify, TabularDataLoaders, tabular_learner
    from fastai.vision.augment import Dihedral

from autoprec.evidence import Configuration, DataSample, Evidence, Feature
from autoprec.policy import NormalizeInputs as Settings
from autoprec.precision import Setting
from autoprec.remedies import REMEDIES, Subject
from autoprec.schedule import FitPlan
from autoprec.snapshot import fingerprint

thread_left_alone = learners.thread_left_alone
pytestmark = learners.FASTAI_WARNINGS
REMEDY = REMEDIES["normalize_inputs"]
EVIDENCE = Evidence(
    configuration=Configuration(device="cpu", requested="fp16"),
    data=DataSample(batches=1, features=(Feature(name="x", min=0, max=1, mean=0, std=1),)),
)


def apply(learn, **settings):
    subject = Subject(learn, FitPlan("fit", 1), Setting("fp16"))
    assert REMEDY.obstacle(subject, EVIDENCE, Settings(**settings)) is None
    return subject, REMEDY.apply(subject, EVIDENCE, Settings(**settings))


def plain(x, *, valid=32, bs=16, model=None):
    y = torch.zeros(len(x), dtype=torch.long)
    return learners.quiet(learners.loaders(x, y, bs=bs, valid=valid), model or nn.Linear(2, 2))


def seen(dl):
    return torch.cat([torch.as_tensor(b[0]) for b in dl]).double().numpy()


def expected(x, axes):
    """Mean and deviation in float64; a constant column is only centred."""
    mean, std = np.nanmean(x, axes, keepdims=True), np.nanstd(x, axes, keepdims=True)
    return mean, np.where(std < 1e-7 * np.maximum(np.abs(mean), 1), 1.0, std)


# ---- plain tensors --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "axes"),
    [((96, 5), 0), ((96, 3, 4, 4), (0, 2, 3)), ((96, 3, 7), (0, 2)), ((96,), 0)],
    ids=["columns", "channels", "sequence", "one column"],
)
def test_the_statistics_are_numpys(shape, axes):
    rng = np.random.default_rng(0)
    x = torch.tensor(rng.normal(3e4, 1e3, shape) * rng.uniform(1, 9, (1, *shape[1:])), dtype=torch.float32)
    learn = plain(x)
    train, held = x[:-32].double().numpy(), x[-32:].double().numpy()
    mean, std = expected(train, axes)
    _, change = apply(learn)
    assert np.allclose(np.ravel(change.data["mean"]), mean.ravel(), rtol=1e-5)
    assert np.allclose(np.ravel(change.data["std"]), std.ravel(), rtol=1e-5)
    got = seen(learn.dls.train)
    assert np.abs(got - (train - mean) / std).max() < 1e-3
    assert np.allclose(got.mean(axes), 0, atol=1e-3)
    assert np.allclose(got.std(axes), 1, atol=1e-3)
    # Validation gets the statistics of the training rows, not its own.
    own = expected(held, axes)
    valid = seen(learn.dls.valid)
    assert np.abs(valid - (held - mean) / std).max() < 1e-3
    assert np.abs(valid - (held - own[0]) / own[1]).max() > 1e-2


def test_the_dtype_and_the_data_themselves_are_as_they_were():
    x = torch.randn(64, 2) * 100
    learn = plain(x.clone())
    apply(learn)
    assert next(iter(learn.dls.train))[0].dtype == torch.float32
    assert torch.equal(learn.dls.train.dataset.tensors[0], x[:-32])


def test_a_constant_column_is_only_centred():
    x = torch.randn(96, 3)
    x[:, 1] = 12345.0
    x[:, 2] = 0.0
    learn = plain(x)
    apply(learn)
    got = seen(learn.dls.train)
    assert np.isfinite(got).all()
    assert (got[:, 1] == 0).all()
    assert (got[:, 2] == 0).all()


def test_a_row_that_is_not_finite_does_not_decide_the_rest():
    x = torch.randn(96, 3) * 50 + 7
    x[5, 1], x[9, 2] = math.nan, math.inf
    learn = plain(x)
    train = x[:-32].double().numpy()
    finite = np.where(np.isfinite(train), train, np.nan)
    mean, std = expected(finite, 0)
    _, change = apply(learn)
    assert np.allclose(change.data["mean"], mean.ravel(), rtol=1e-4)
    assert np.allclose(change.data["std"], std.ravel(), rtol=1e-4)
    got = seen(learn.dls.train)
    assert (~np.isfinite(got)).sum() == 2  # nothing is hidden either


def test_a_timestamp_keeps_its_differences():
    """Seconds since 1970 over a month: a deviation of 7e5 beside a mean of 1.7e9, which float32 rounds by 64."""
    seconds = 1.7e9 + np.arange(96) * 27000.0
    x = torch.tensor(seconds[:, None], dtype=torch.float32)
    learn = plain(x, model=nn.Linear(1, 2))
    train = x[:-32].double().numpy()
    mean, std = expected(train, 0)
    apply(learn)
    assert np.abs(seen(learn.dls.train) - (train - mean) / std).max() < 1e-3


def test_only_so_many_batches_are_read():
    x = torch.cat([torch.ones(16, 2), torch.full((48, 2), 9.0), torch.zeros(32, 2)])
    _, change = apply(plain(x), batches=1)
    assert change.data["mean"] == [1.0, 1.0]


def test_the_first_floating_input_is_normalized_and_nothing_else():
    ids, x, y = torch.randint(0, 9, (96, 4)), torch.randn(96, 2) * 100, torch.randn(96, 1) * 100
    learn = learners.quiet(learners.loaders(ids, x, y), nn.Linear(2, 1), nn.MSELoss())
    apply(learn)
    got = [torch.cat([b[i] for b in learn.dls.train]) for i in range(3)]
    assert torch.equal(got[0], ids[:-32])
    assert got[1].std() < 2
    assert torch.equal(got[2], y[:-32])


def test_the_loaders_own_batch_transform_comes_first():
    x = torch.randn(96, 2)
    data = TensorDataset(x, torch.zeros(96, dtype=torch.long))
    dls = DataLoaders(*[DataLoader(data, bs=16, after_batch=_times_thousand) for _ in range(2)])
    dls.device = torch.device("cpu")
    learn = learners.quiet(dls, nn.Linear(2, 2))
    mean, std = expected(x.double().numpy() * 1000 + 5, 0)
    _, change = apply(learn)
    assert np.allclose(change.data["mean"], mean.ravel(), rtol=1e-4)
    assert np.allclose(seen(dls.train), (x.double().numpy() * 1000 + 5 - mean) / std, atol=1e-4)


def _times_thousand(batch):
    return batch[0] * 1000 + 5, batch[1]


def test_new_loaders_of_the_learner_have_it_too():
    x = torch.randn(96, 2) * 1000
    learn = plain(x)
    _, change = apply(learn)
    rows = x[:7]
    dl = learn.dls.valid.new(TensorDataset(rows, torch.zeros(7, dtype=torch.long)))
    mean, std = np.array(change.data["mean"]), np.array(change.data["std"])
    assert np.allclose(seen(dl), (rows.double().numpy() - mean) / std, atol=1e-3)


def test_undoing_gives_the_very_loaders_back():
    learn = plain(torch.randn(96, 2) * 1000)
    batch = next(iter(learn.dls.train))[0]
    before = fingerprint(learn)
    subject, change = apply(learn)
    REMEDY.undo(subject, change)
    assert before.differences(fingerprint(learn)) == ()
    assert "after_batch" not in vars(learn.dls.train)
    assert torch.equal(next(iter(learn.dls.train))[0], batch)


# ---- images ---------------------------------------------------------------------------------------------------


def images(transforms=()):
    rng = np.random.default_rng(1)
    pixels = rng.integers(0, 256, (48, 3, 6, 6)) * np.array([1.0, 0.5, 0.2])[None, :, None, None]
    items = [(TensorImage(torch.tensor(p, dtype=torch.float32)), i % 2) for i, p in enumerate(pixels)]
    dls = DataLoaders.from_dsets(
        items[:32], items[32:], bs=8, shuffle=False, after_batch=[*transforms], device="cpu", num_workers=0
    )
    model = nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(32, 2))
    return learners.quiet(dls, model), pixels[:32].astype(np.float32).astype(float), pixels[32:]


def test_images_get_fastais_own_normalize():
    learn, train, held = images()
    mean, std = expected(train, (0, 2, 3))
    _, change = apply(learn)
    for dl in learn.dls.loaders:
        assert [type(t) for t in dl.after_batch.fs] == [Normalize]
    assert np.allclose(change.data["mean"], mean.ravel(), rtol=1e-5)
    assert np.allclose(change.data["std"], std.ravel(), rtol=1e-5)
    assert "fastai Normalize" in change.what
    assert np.abs(seen(learn.dls.train) - (train - mean) / std).max() < 1e-4
    assert np.abs(seen(learn.dls.valid) - (held - mean) / std).max() < 1e-4


def test_the_transform_stands_last_and_sees_what_the_others_made():
    learn, *_ = images([Dihedral(p=0.0), IntToFloatTensor()])
    before = [type(t).__name__ for t in learn.dls.train.after_batch.fs]
    subject, change = apply(learn)
    after = [type(t).__name__ for t in learn.dls.train.after_batch.fs]
    assert after == [*before, "Normalize"]
    REMEDY.undo(subject, change)
    assert [type(t).__name__ for t in learn.dls.train.after_batch.fs] == before


def test_undo_of_images():
    learn, *_ = images([Dihedral(p=0.5)])
    before = fingerprint(learn)
    subject, change = apply(learn)
    assert before.differences(fingerprint(learn)) != ()
    REMEDY.undo(subject, change)
    assert before.differences(fingerprint(learn)) == ()


# ---- tables ---------------------------------------------------------------------------------------------------


def table():
    rng = np.random.default_rng(2)
    n = 96
    frame = pd.DataFrame({
        "when": 1.7e9 + rng.integers(0, 10**6, n),
        "size": rng.normal(1e5, 2e4, n),
        "same": np.full(n, 7.0),
        "kind": rng.choice(["a", "b"], n),
        "y": rng.integers(0, 2, n),
    })  # fmt: skip
    dls = TabularDataLoaders.from_df(
        frame, procs=[Categorify], cat_names=["kind"], cont_names=["when", "size", "same"], y_names="y",
        y_block=_category(), valid_idx=list(range(64, 96)), bs=16, device=torch.device("cpu"),
    )  # fmt: skip
    learn = tabular_learner(dls, layers=[8], loss_func=learners.CrossEntropyLossFlat())
    learn.logger, learn.create_mbar = learners.say_nothing, False
    return learn, frame


def _category():
    from fastai.data.block import CategoryBlock

    return CategoryBlock()


def conts(dl):
    return dl.dataset.conts.to_numpy(dtype=float)


def test_a_table_gets_fastais_own_proc_fitted_to_the_training_rows():
    learn, frame = table()
    columns = ["when", "size", "same"]
    train, held = frame[columns].to_numpy(float)[:64], frame[columns].to_numpy(float)[64:]
    kinds = learn.dls.train.dataset.cats.to_numpy().copy()
    _, change = apply(learn)
    mean, std = train.mean(0), train.std(0)
    for i, name in enumerate(columns[:2]):
        # fastai's table normalizes by pandas' or numpy's deviation: one row in 64 apart
        assert change.data["mean"][name] == pytest.approx(mean[i], rel=1e-6)
        assert change.data["std"][name] == pytest.approx(std[i], rel=2e-2)
        assert np.allclose(conts(learn.dls.train)[:, i].std(), 1, atol=2e-2)
        scaled = (held[:, i] - mean[i]) / change.data["std"][name]
        assert np.allclose(conts(learn.dls.valid)[:, i], scaled, atol=1e-3)
    assert np.isfinite(conts(learn.dls.train)).all()
    assert np.abs(conts(learn.dls.train)[:, 2]).max() < 1e-3
    assert (learn.dls.train.dataset.cats.to_numpy() == kinds).all()


def test_new_rows_of_a_table_are_normalized_like_the_training_rows():
    learn, frame = table()
    apply(learn)
    got = conts(learn.dls.test_dl(frame.iloc[64:].copy()))
    # to the 64 seconds by which the loaders' own float32 rounds a timestamp
    assert np.allclose(got, conts(learn.dls.valid), atol=1e-3)


def test_undo_of_a_table():
    learn, _ = table()
    before = [
        (conts(dl).copy(), list(dl.dataset.procs.fs), dl.dataset.items.dtypes.to_dict()) for dl in learn.dls.loaders
    ]
    frames = [dl.dataset.items for dl in learn.dls.loaders]
    mark = fingerprint(learn)
    subject, change = apply(learn)
    assert not np.allclose(conts(learn.dls.train), before[0][0])
    REMEDY.undo(subject, change)
    for dl, frame, (values, procs, dtypes) in zip(learn.dls.loaders, frames, before, strict=True):
        assert np.array_equal(conts(dl), values)
        assert list(dl.dataset.procs.fs) == procs
        assert dl.dataset.items.dtypes.to_dict() == dtypes
        assert dl.dataset.items is frame
    assert mark.differences(fingerprint(learn)) == ()
