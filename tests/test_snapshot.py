"""Probes leave nothing behind, over a table of kinds of Learner; and each part of the fingerprint is needed."""

from __future__ import annotations

import random
import warnings
from collections import deque
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # fastai's own imports
    from fastai.callback.core import Callback, CancelFitException
    from fastai.callback.hook import ActivationStats
    from fastai.callback.mixup import CutMix, MixUp
    from fastai.callback.progress import ProgressCallback
    from fastai.callback.training import GradientAccumulation
    from fastai.data.core import DataLoaders
    from fastai.data.transforms import Normalize
    from fastai.learner import Learner
    from fastai.losses import CrossEntropyLossFlat
    from fastai.metrics import accuracy
    from fastai.optimizer import OptimWrapper
    from fastai.tabular.all import Categorify, FillMissing, tabular_learner
    from fastai.tabular.all import Normalize as NormalizeTable
    from fastai.tabular.data import TabularDataLoaders
    from fastai.vision.augment import Dihedral

from autoprec.errors import RestoreError
from autoprec.snapshot import SECTIONS, Fingerprint, Snapshot, _refill_object, fingerprint, preserved, release_autocast

pytestmark = [
    # fastai 2.8 on torch 2.14: pinning asked for without an accelerator, and torch's own scheduler of warnings
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:The given NumPy array is not writable:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*shadowing an attribute.*:UserWarning"),
]

# Two equal fits differ in these alone: the clock, and the identity of a callback that `no_bar` puts in anew.
CLOCK = {"recorder/start_epoch", "recorder/log"}
# ... and where weak references and the numbers of hooks are kept.
HANDLES = {"callbacks/activation_stats/hooks", "attributes/0.rnns.0.module", "attributes/0.rnns.1.module"}


@pytest.fixture(autouse=True)
def _leave_thread_alone():
    yield
    release_autocast()
    torch.set_grad_enabled(True)


def quiet(dls, model, **kwargs):
    learn = Learner(dls, model, **{"loss_func": CrossEntropyLossFlat(), **kwargs})
    learn.remove_cb(ProgressCallback)
    learn.logger = _say_nothing
    return learn


def _say_nothing(*_args):
    pass


def _seed(seed=0):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _image_loaders(n=24, bs=8, size=8, **kwargs):
    xs, ys = torch.randn(n, 3, size, size), torch.randint(0, 3, (n,))
    items = [(x, int(y)) for x, y in zip(xs, ys, strict=True)]
    kwargs = {"after_batch": [Normalize.from_stats([0.1] * 3, [0.9] * 3, cuda=False)], "num_workers": 0, **kwargs}
    dls = DataLoaders.from_dsets(items, items[:8], bs=bs, shuffle=True, device=torch.device("cpu"), **kwargs)
    dls.c = 3
    return dls


def _net():
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(0.2), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(6, 3),
    )  # fmt: skip


def cnn(**kwargs):
    return quiet(_image_loaders(), _net(), metrics=accuracy, **kwargs)


def _halves(model):
    return [list(model[:3].parameters()), list(model[3:].parameters())]


def cnn_with_optimizer():
    learn = cnn(splitter=_halves)
    learn.create_opt()
    return learn


def cnn_after_a_fit():
    learn = cnn()
    learn.fit(1, 1e-2)
    return learn


def augmented():
    noise = Jitter()
    dls = _image_loaders(after_batch=[Dihedral(p=0.7), noise, Normalize.from_stats([0.1] * 3, [0.9] * 3, cuda=False)])
    return quiet(dls, _net())


class Jitter(Dihedral):
    """Draws from three generators and remembers a tensor, so that all of them have to be put back."""

    order = 99

    def __init__(self):
        super().__init__(p=1.0)
        self.own = torch.Generator().manual_seed(7)
        self.seen = torch.zeros(3)

    def before_call(self, b, split_idx):
        super().before_call(b, split_idx)
        self.shift = float(np.random.rand()) + random.random() + float(torch.rand(1, generator=self.own))
        self.seen += self.shift


def mlp_adamw():
    dls = _image_loaders(after_batch=None)
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.ReLU(), nn.Linear(8, 3))
    return quiet(dls, model, opt_func=partial(OptimWrapper, opt=torch.optim.AdamW), splitter=_halves)


def mlp_adamw_trained():
    learn = mlp_adamw()
    learn.fit(1, 1e-2)
    return learn


class Tied(nn.Module):
    """Shared weights, a shared storage, a non-persistent buffer and state that is set in forward."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(192, 192), nn.Linear(192, 192)
        self.second.weight = self.first.weight
        self.second.bias.data = self.first.bias.data  # another Parameter over the same storage
        self.head = nn.Linear(192, 3)
        self.register_buffer("mean", torch.zeros(192), persistent=False)
        self.calls, self.last = 0, None

    def forward(self, x):
        self.calls += 1
        self.last = self.second(torch.tanh(self.first(x.flatten(1) - self.mean)))
        if self.training:
            self.mean.lerp_(x.flatten(1).mean(0), 0.1)
        return self.head(self.last)


def tied():
    return quiet(_image_loaders(), Tied())


def mixup():
    return cnn(cbs=MixUp(0.4))


def cutmix():
    return cnn(cbs=CutMix())


def accumulation():
    return cnn(cbs=GradientAccumulation(16))


def activation_stats():
    return cnn(cbs=ActivationStats(modules=None))


def wine():
    import pandas as pd
    from sklearn.datasets import load_wine

    table = load_wine(as_frame=True).frame.iloc[::3].reset_index(drop=True)
    table["kind"] = pd.cut(table["hue"], 3, labels=["low", "middle", "high"]).astype(str)
    dls = TabularDataLoaders.from_df(
        table, procs=[Categorify, FillMissing, NormalizeTable], cat_names=["kind"], y_names="target",
        cont_names=["alcohol", "proline", "flavanoids"], y_block=_category(), valid_idx=list(range(10)), bs=16,
        device=torch.device("cpu"), num_workers=0,
    )  # fmt: skip
    learn = tabular_learner(dls, layers=[8], metrics=accuracy)
    learn.remove_cb(ProgressCallback)
    learn.logger = _say_nothing
    return learn


def _category():
    from fastai.data.block import CategoryBlock

    return CategoryBlock()


def language_model():
    from fastai.text.data import LMDataLoader
    from fastai.text.learner import LMLearner
    from fastai.text.models.awdlstm import AWD_LSTM, awd_lstm_lm_config
    from fastai.text.models.core import get_language_model

    texts = [torch.randint(2, 20, (30 + i,)) for i in range(6)]
    train = LMDataLoader(texts, bs=4, seq_len=7, shuffle=True)
    valid = LMDataLoader(texts[:3], bs=4, seq_len=7)
    config = {**awd_lstm_lm_config, "emb_sz": 8, "n_hid": 10, "n_layers": 2}
    model = get_language_model(AWD_LSTM, 20, config=config)
    dls = DataLoaders(train, valid, device=torch.device("cpu"))
    learn = LMLearner(dls, model, loss_func=CrossEntropyLossFlat())
    learn.remove_cb(ProgressCallback)
    learn.logger = _say_nothing
    return learn


def resnet():
    from fastai.vision.learner import vision_learner
    from torchvision.models import resnet18

    learn = vision_learner(_image_loaders(size=32), resnet18, pretrained=False, n_out=3, normalize=False,
                           loss_func=CrossEntropyLossFlat())  # fmt: skip
    learn.remove_cb(ProgressCallback)
    learn.logger = _say_nothing
    return learn


def two_workers():
    return quiet(_image_loaders(num_workers=2, after_item=[WorkerNoise()]), _net())


class WorkerNoise(Dihedral):
    """Draws inside the worker processes."""

    def __call__(self, b, split_idx=None, **_kwargs):
        image, label = b
        return image + float(np.random.rand()) + random.random() + torch.rand(1), label


def one_cycle(learn):
    learn.fit_one_cycle(2, 1e-2)


def plain(learn):
    learn.fit(1, 1e-2)


def fine_tune(learn):
    learn.fine_tune(1, 1e-2)


def frozen_then_not(learn):
    learn.freeze()
    learn.fit(1, 1e-2)
    learn.unfreeze()


def adds_and_breaks(learn):
    """What no probe should do, all at once."""
    learn.fit(1, 1e-2, cbs=MixUp())
    learn.add_cb(GradientAccumulation(2))
    learn.remove_cb(type(learn.cbs[0]))
    learn.model.add_module("extra", nn.Linear(1, 1))
    next(learn.model.children()).register_forward_hook(lambda *_: None)
    learn.model.requires_grad_(False)
    learn.model.eval()
    learn.model.half()
    learn.opt = None
    learn.loss_func = nn.MSELoss()
    learn.scaler = torch.amp.GradScaler("cpu")
    learn.dls.train.after_batch.fs.clear()
    torch.autocast("cpu").__enter__()


CASES = [
    (cnn, one_cycle), (cnn, adds_and_breaks), (cnn_with_optimizer, one_cycle), (cnn_after_a_fit, one_cycle),
    (cnn_after_a_fit, adds_and_breaks), (cnn_with_optimizer, frozen_then_not), (augmented, one_cycle),
    (mlp_adamw, one_cycle), (mlp_adamw_trained, one_cycle), (mlp_adamw_trained, frozen_then_not), (tied, plain),
    (tied, adds_and_breaks), (mixup, one_cycle), (cutmix, plain), (accumulation, one_cycle),
    (activation_stats, plain), (wine, one_cycle), (language_model, one_cycle),
    pytest.param(resnet, fine_tune, marks=pytest.mark.long),
    pytest.param(two_workers, plain, marks=pytest.mark.long),
]  # fmt: skip


@pytest.mark.parametrize(("build", "fit"), CASES)
def test_two_fits_from_one_snapshot_are_bit_identical(build, fit):
    _seed()
    learn = build()
    objects = {name: id(p) for name, p in learn.model.named_parameters()}
    identities = id(learn.opt), [id(cb) for cb in learn.cbs], id(learn.loss_func)
    snapshot = Snapshot.capture(learn)
    seen = []
    for _ in range(2):
        fit(learn)
        seen.append((fingerprint(learn), [list(values) for values in learn.recorder.values], learn.recorder.losses))
        assert "weights" in {name.partition("/")[0] for name in snapshot.fingerprint.differences(seen[-1][0])}
        snapshot.restore(learn)
        assert snapshot.fingerprint.differences(fingerprint(learn)) == ()
    (first, values, losses), (second, values_again, losses_again) = seen
    assert values == values_again
    assert all(map(torch.equal, losses, losses_again))
    if fit is not adds_and_breaks:
        assert set(first.differences(second)) <= CLOCK | HANDLES
    assert {name: id(p) for name, p in learn.model.named_parameters()} == objects
    assert (id(learn.opt), [id(cb) for cb in learn.cbs], id(learn.loss_func)) == identities
    assert all(getattr(learn, cb.name) is cb and cb.learn is learn for cb in learn.cbs)


def test_a_snapshot_in_host_memory_restores_the_same():
    _seed()
    learn = cnn_after_a_fit()
    snapshot = Snapshot.capture(learn, device="cpu")
    plain(learn)
    snapshot.restore(learn)
    assert fingerprint(learn) == snapshot.fingerprint


def test_no_optimizer_yet_is_restored_as_none():
    learn = cnn()
    snapshot = Snapshot.capture(learn)
    plain(learn)
    assert learn.opt is not None
    snapshot.restore(learn)
    assert learn.opt is None
    assert not hasattr(learn.recorder, "values")
    assert all(p.grad is None for p in learn.model.parameters())


def test_the_same_batches_come_again():
    _seed()
    learn = augmented()
    snapshot = Snapshot.capture(learn)
    first = [x.clone() for x, _ in learn.dls.train]
    other = [x.clone() for x, _ in learn.dls.train]
    snapshot.restore(learn)
    again = [x.clone() for x, _ in learn.dls.train]
    assert all(map(torch.equal, first, again))
    assert not all(map(torch.equal, first, other))


def test_restoring_does_not_hand_out_the_copies():
    learn = cnn_after_a_fit()
    snapshot = Snapshot.capture(learn)
    for _ in range(3):
        snapshot.restore(learn)
        with torch.no_grad():
            for tensor in [*learn.model.parameters(), *learn.model.buffers()]:
                tensor.zero_()
        learn.recorder.values.clear()
        learn.opt.hypers[0].clear()
        learn.opt.state.clear()
        assert snapshot.fingerprint.differences(fingerprint(learn))
    snapshot.restore(learn)
    assert fingerprint(learn) == snapshot.fingerprint


def test_tied_tensors_are_copied_once_and_stay_tied():
    learn = tied()
    snapshot = Snapshot.capture(learn)
    one_of_each = sum(
        p.nbytes for p in [learn.model.first.weight, learn.model.first.bias, *learn.model.head.parameters()]
    )
    held = sum(len(thunk.args[-1]) for section, thunk in snapshot._thunks if section == "model" and _is_copy(thunk))
    assert held == one_of_each + learn.model.mean.nbytes
    plain(learn)
    snapshot.restore(learn)
    assert learn.model.second.weight is learn.model.first.weight
    assert learn.model.second.bias.data_ptr() == learn.model.first.bias.data_ptr()


def _is_copy(thunk):
    return getattr(getattr(thunk, "func", None), "__qualname__", "") == "_Storages._put_back"


def test_only_the_named_sections_are_put_back():
    learn = cnn_after_a_fit()
    snapshot = Snapshot.capture(learn)
    learn.fit(1, 1e-2)
    learn.marker = 1
    snapshot.restore(learn, only={"model", "optimizer"})
    left = {name.partition("/")[0] for name in snapshot.fingerprint.differences(fingerprint(learn))}
    assert left.isdisjoint({"weights", "buffers", "modes", "gradients", "optimizer"})
    assert {"recorder", "learner", "rng"} <= left
    assert learn.marker == 1
    with pytest.raises(ValueError, match=r"unknown sections \['weights'\]: choose from model, optimizer"):
        snapshot.restore(learn, only={"weights"})


def test_sections_cover_everything_once():
    learn = cnn_after_a_fit()
    snapshot = Snapshot.capture(learn)
    assert {section for section, _ in snapshot._thunks} <= set(SECTIONS)
    learn.fit(1, 1e-2)
    for section in SECTIONS:
        snapshot.restore(learn, only=[section])
    assert fingerprint(learn) == snapshot.fingerprint


def test_another_learner_is_refused():
    snapshot = Snapshot.capture(cnn())
    with pytest.raises(RestoreError, match="another Learner"):
        snapshot.restore(cnn())


def test_a_snapshot_without_fingerprint_says_so():
    with pytest.raises(ValueError, match="with_fingerprint=False"):
        _ = Snapshot.capture(cnn(), with_fingerprint=False).fingerprint


def test_taking_a_snapshot_changes_nothing_and_draws_nothing():
    learn = cnn_after_a_fit()
    before = fingerprint(learn)
    Snapshot.capture(learn)
    assert fingerprint(learn) == before
    assert hash(before) == hash(fingerprint(learn))


def test_a_probe_inside_a_running_fit_does_not_disturb_it():
    class Probe(Callback):
        def after_batch(self):
            if self.training and self.iter == 1:
                learn = self.learn
                with preserved(learn):
                    learn.fit(1, 0.5)

    _seed()
    learn = cnn()
    snapshot = Snapshot.capture(learn)
    one_cycle(learn)
    alone = fingerprint(learn), learn.recorder.values
    snapshot.restore(learn)
    probe = Probe()
    depth = []
    probe.before_fit = lambda: depth.append(1) or setattr(probe, "run_train", len(depth) == 1)
    learn.add_cb(probe)
    one_cycle(learn)
    learn.remove_cb(probe)
    assert len(depth) == 3
    assert learn.recorder.values == alone[1]
    assert {n for n in alone[0].differences(fingerprint(learn)) if n.startswith(("weights", "rng", "optim"))} == set()


# ---------------------------------------------------------------------------------------- each part is needed


class Keeper(Callback):
    """Every kind of thing that a callback can hold."""

    def __init__(self, dataset=()):
        self.numbers = [1, [2, 3]]
        self.table = {"a": torch.zeros(2), "b": {"deep": deque([1])}}
        self.names = {"x"}
        self.pair = (torch.ones(2), [0])
        self.array = np.arange(3.0)
        self.scores = SimpleNamespace(best=0.0, seen=[])
        self.dice = np.random.default_rng(0)
        self.average = nn.Linear(2, 2)
        self.data = dataset


@pytest.fixture(scope="module")
def trained():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _seed()
        learn = cnn(cbs=Keeper())
        learn.fit(1, 1e-2)
    return learn


def _flip(tensor, index=0, bit=0):
    flat = tensor.detach().view(-1).view(torch.uint8)
    flat[index] ^= 1 << bit


def _hyper(learn):
    learn.opt.hypers[0]["lr"] *= 1 + 1e-15


CHANGES = {
    "weights/0.weight": lambda learn: _flip(learn.model[0].weight),
    "weights/6.bias": lambda learn: setattr(learn.model[6], "bias", nn.Parameter(torch.zeros(3))),
    "buffers/1.running_mean": lambda learn: _flip(learn.model[1].running_mean),
    "gradients/0.weight": lambda learn: _flip(learn.model[0].weight.grad),
    "gradients/6.weight": lambda learn: setattr(learn.model[6].weight, "grad", None),
    "requires_grad": lambda learn: learn.model[0].weight.requires_grad_(False),
    "modes": lambda learn: learn.model[1].train(not learn.model[1].training),
    "modules": lambda learn: learn.model.add_module("more", nn.ReLU()),
    "hooks/2": lambda learn: learn.model[2].register_forward_hook(print),
    "hooks/(model)": lambda learn: learn.model.register_full_backward_hook(print),
    "hooks/0.weight": lambda learn: learn.model[0].weight.register_hook(print),
    "attributes/3": lambda learn: setattr(learn.model[3], "p", 0.3),
    "attributes/0.weight": lambda learn: setattr(learn.model[0].weight, "mark", 1),
    "optimizer": lambda learn: setattr(learn, "opt", None),
    "optimizer/hypers": _hyper,
    "optimizer/frozen_idx": lambda learn: setattr(learn.opt, "frozen_idx", 1),
    "optimizer/state/0.weight": lambda learn: _flip(learn.opt.state[learn.model[0].weight]["grad_avg"]),
    "optimizer/groups": lambda learn: learn.opt.param_lists[0].pop(),
    "scaler": lambda learn: setattr(learn, "scaler", torch.amp.GradScaler("cpu")),
    "rng/python": lambda learn: random.random(),
    "rng/numpy": lambda learn: np.random.rand(),
    "rng/torch": lambda learn: torch.rand(1),
    "rng/dl/train": lambda learn: learn.dls.train.rng.random(),
    "rng/dl/valid": lambda learn: learn.dls.valid.randomize(),
    "transforms/train/after_batch/0.Normalize": lambda learn: _flip(learn.dls.train.after_batch[0].mean),
    "transforms/train/after_batch": lambda learn: learn.dls.train.after_batch.add(Normalize()),
    "dls/train/bs": lambda learn: setattr(learn.dls.train, "bs", 3),
    "dls/train/dataset": lambda learn: setattr(learn.dls.train, "dataset", list(learn.dls.train.dataset)),
    "dls": lambda learn: setattr(learn.dls, "path", "elsewhere"),
    "metrics/0": lambda learn: learn.metrics[0].reset(),
    "loss": lambda learn: setattr(learn.loss_func, "axis", 1),
    "callbacks/list": lambda learn: learn.add_cb(MixUp()),
    "callbacks/keeper/numbers": lambda learn: learn.keeper.numbers[1].append(4),
    "callbacks/keeper/table": lambda learn: learn.keeper.table["b"]["deep"].appendleft(0),
    "callbacks/keeper/names": lambda learn: learn.keeper.names.add("y"),
    "callbacks/keeper/pair": lambda learn: learn.keeper.pair[0].mul_(-1),
    "callbacks/keeper/array": lambda learn: learn.keeper.array.__setitem__(0, -0.0),
    "callbacks/keeper/scores": lambda learn: learn.keeper.scores.seen.append(1),
    "callbacks/keeper/dice": lambda learn: learn.keeper.dice.random(),
    "callbacks/keeper/average": lambda learn: _flip(learn.keeper.average.weight),
    "callbacks/keeper/new": lambda learn: setattr(learn.keeper, "new", 1),
    "callbacks/keeper/learn": lambda learn: setattr(learn.keeper, "learn", None),
    "recorder/values": lambda learn: learn.recorder.values.append(0),
    "recorder/smooth_loss": lambda learn: setattr(learn.recorder.smooth_loss, "beta", 0.5),
    "learner/marker": lambda learn: setattr(learn, "marker", 1),
    "learner/lr": lambda learn: setattr(learn, "lr", 1),
    "weights/weight": lambda learn: setattr(learn, "model", nn.Linear(1, 1)),
    "learner/keeper": lambda learn: delattr(learn, "keeper"),
    "autocast": lambda learn: torch.autocast("cpu").__enter__(),
    "grad_mode": lambda learn: torch.set_grad_enabled(False),
}  # fmt: skip


@pytest.mark.parametrize("part", CHANGES)
def test_one_change_is_named_and_put_back(trained, part):
    snapshot = Snapshot.capture(trained)
    CHANGES[part](trained)
    changed = snapshot.fingerprint.differences(fingerprint(trained))
    assert part in changed
    assert len(changed) < 60
    snapshot.restore(trained)
    assert fingerprint(trained) == snapshot.fingerprint


def test_a_flip_of_any_captured_value_is_seen(trained):
    """Completeness: whatever the snapshot holds, the fingerprint looks at."""
    snapshot = Snapshot.capture(trained)
    thunks = [thunk for _, thunk in snapshot._thunks if getattr(thunk, "args", None)]
    holders = [thunk.args[0] for thunk in thunks if thunk.func is not _refill_object]
    holders += [
        vars(thunk.args[0])
        for thunk in thunks
        if thunk.func is _refill_object and not isinstance(thunk.args[0], dict)  # OrderedDict has an idle one
    ]
    blind = []
    for holder in holders:
        if isinstance(holder, torch.UntypedStorage) and holder.nbytes():
            holder[0] = holder[0] ^ 1
        elif isinstance(holder, dict):
            holder["foreign"] = None
        elif isinstance(holder, list):
            holder.append(holder[0] if holder else None)
        elif isinstance(holder, set):
            holder.add("foreign")
        else:
            continue
        if fingerprint(trained) == snapshot.fingerprint:
            blind.append(f"{type(holder).__name__} with {list(holder)[:3]}")
        snapshot.restore(trained)
        assert fingerprint(trained) == snapshot.fingerprint
    assert blind == []
    assert len(holders) > 300


@pytest.mark.parametrize("left_out", ["model", "optimizer", "callbacks", "metrics", "data", "learner", "thread"])
def test_leaving_out_a_section_is_seen(left_out):
    _seed()
    learn = cnn_after_a_fit()
    snapshot = Snapshot.capture(learn)
    learn.fit(1, 1e-2)
    learn.metrics[0].reset()  # else the accuracy may be what it was
    snapshot.restore(learn, only=set(SECTIONS) - {left_out})
    assert snapshot.fingerprint.differences(fingerprint(learn))
    snapshot.restore(learn)
    assert fingerprint(learn) == snapshot.fingerprint


@pytest.mark.parametrize(("value", "other"), [(0.0, -0.0), (float("nan"), 1.0)])
def test_digests_see_bits_not_values(value, other):
    learn = mlp_adamw()
    bias = learn.model[1].bias.data
    bias.fill_(value)
    before = fingerprint(learn)
    bias[0] = other
    assert before.differences(fingerprint(learn)) == ("weights/1.bias",)


def test_digests_tell_nan_payloads_apart():
    learn = mlp_adamw()
    bias = learn.model[1].bias.data
    bias.fill_(float("nan"))
    before = fingerprint(learn)
    bias.view(torch.int32)[0] ^= 1
    assert bias.isnan().all()
    assert before.differences(fingerprint(learn)) == ("weights/1.bias",)


def test_fingerprints_compare_by_part():
    one, two = Fingerprint({"a": "1", "b": "2"}), Fingerprint({"b": "3", "a": "1", "c": "4"})
    assert one.differences(two) == two.differences(one) == ("b", "c")
    assert one != two
    assert one == Fingerprint({"b": "2", "a": "1"})


# ---------------------------------------------------------------------------------------- by reference


def test_datasets_locks_and_files_are_not_copied_nor_looked_into(tmp_path):
    learn = cnn()
    keeper = Keeper(dataset=learn.dls.train.dataset)
    with (tmp_path / "log").open("w") as file:
        keeper.client = SimpleNamespace(file=file, count=0)  # an unknown object around a file: an application
        keeper.lock = learn.lock
        learn.add_cb(keeper)
        snapshot = Snapshot.capture(learn)
        first = learn.dls.train.dataset[0][0]
        value = first.clone()
        first.add_(1)
        keeper.client.count = 5
        file.write("kept")
        keeper.client = None
        snapshot.restore(learn)
        assert torch.equal(first, value + 1)
        assert keeper.client.count == 5
        assert keeper.lock is learn.lock
        assert fingerprint(learn) == snapshot.fingerprint


def test_a_callback_added_in_a_probe_is_let_go():
    learn = cnn()
    with preserved(learn):
        added = Keeper()
        learn.add_cb(added)
        removed = learn.train_eval
        learn.remove_cb(removed)
    assert added.learn is None
    assert added not in learn.cbs
    assert not hasattr(learn, "keeper")
    assert learn.train_eval is removed
    assert removed.learn is learn


def test_sparse_gradients_and_moved_parameters_come_back():
    class Sparse(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Embedding(5, 4, sparse=True), nn.Linear(4, 3)

        def forward(self, x):
            return self.head(self.table((x.flatten(1)[:, 0] > 0).long()))

    learn = quiet(_image_loaders(), Sparse())
    learn.model.table(torch.tensor([1, 2])).sum().backward()
    before = learn.model.table.weight.grad.to_dense().clone()
    snapshot = Snapshot.capture(learn)
    learn.model.double()
    learn.model.table.weight.grad = None
    learn.model.head.weight.data = learn.model.head.weight.data.t().contiguous()
    snapshot.restore(learn)
    assert torch.equal(learn.model.table.weight.grad.to_dense(), before)
    assert learn.model.head.weight.dtype == torch.float32
    assert fingerprint(learn) == snapshot.fingerprint


def test_weight_norm_and_channels_last_come_back():
    model = _net()
    nn.utils.parametrizations.weight_norm(model[0])
    learn = quiet(_image_loaders(), model)
    with preserved(learn):
        learn.model.to(memory_format=torch.channels_last)
        plain(learn)
        nn.utils.parametrize.remove_parametrizations(model[0], "weight")
    assert hasattr(model[0], "parametrizations")


# ---------------------------------------------------------------------------------------- preserved


class Stop(Callback):
    def __init__(self, event, error):
        setattr(self, event, self.stop)
        self.error = error

    def stop(self):
        raise self.error


@pytest.mark.parametrize("event", ["before_batch", "after_pred", "before_validate", "before_step"])
@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt(), CancelFitException(), GeneratorExit()])
def test_whatever_ends_a_probe_everything_is_put_back(event, error):
    learn = cnn(cbs=MixUp())
    before = fingerprint(learn)
    raised = None
    try:
        with preserved(learn):
            learn.fit(1, cbs=Stop(event, error))
    except BaseException as caught:  # noqa: BLE001
        raised = caught
    assert type(raised) is (type(None) if isinstance(error, CancelFitException) else type(error))
    assert fingerprint(learn) == before


def test_what_cannot_be_put_back_is_an_error_that_names_it_and_keeps_the_cause(monkeypatch):
    learn = cnn()
    monkeypatch.setattr(Snapshot, "restore", lambda self, learn: None)
    cause = KeyError("first")

    def probe():
        with preserved(learn):
            learn.left = random.random()
            raise cause

    with pytest.raises(RestoreError, match=r"not as it was before the block: learner/left, rng/python\.") as caught:
        probe()
    assert caught.value.__cause__ is cause


def test_ctrl_c_while_restoring_does_not_leave_half_of_it(monkeypatch):
    learn = cnn()
    before = fingerprint(learn)
    whole, calls = Snapshot.restore, []

    def interrupted(self, learn, **kwargs):
        calls.append(1)
        if len(calls) == 1:
            raise KeyboardInterrupt
        whole(self, learn, **kwargs)

    monkeypatch.setattr(Snapshot, "restore", interrupted)
    with pytest.raises(KeyboardInterrupt), preserved(learn):
        plain(learn)
    assert fingerprint(learn) == before


# ---------------------------------------------------------------------------------------- autocast


class LeaksAutocast(Callback):
    """What fastai's MixedPrecision does, on the CPU: enter in before_batch, leave in after_loss."""

    def before_batch(self):
        self.autocast = torch.autocast("cpu", dtype=torch.bfloat16)
        self.autocast.__enter__()

    def after_loss(self):
        self.autocast.__exit__(None, None, None)


def _raise_in_forward(learn):
    def fail(*_):
        learn.model[1](torch.ones(1, 192))  # one half copy of the weights enters the cache
        raise RuntimeError("forward")

    return learn.model[3].register_forward_hook(fail)


def test_autocast_left_on_is_put_back_and_later_fits_are_those_of_a_fresh_learner():
    def losses(learn, cbs=None):
        learn.fit(2, 0.1, cbs=cbs)
        return [float(loss) for loss in learn.recorder.losses]

    _seed()
    fresh = mlp_adamw()
    snapshot = Snapshot.capture(fresh)
    expected = losses(fresh)
    snapshot.restore(fresh)
    expected_half = losses(fresh, LeaksAutocast())
    snapshot.restore(fresh)
    assert expected != expected_half

    def probe():
        with preserved(fresh):
            _raise_in_forward(fresh)
            for _ in range(3):
                torch.autocast("cpu", dtype=torch.bfloat16).__enter__()
            fresh.fit(1, cbs=LeaksAutocast())

    with pytest.raises(RuntimeError, match="forward"):
        probe()
    assert not torch.is_autocast_enabled("cpu")
    assert losses(fresh) == expected
    snapshot.restore(fresh)
    assert losses(fresh, LeaksAutocast()) == expected_half


def test_release_autocast_leaves_every_level_and_forgets_stale_weights():
    layer, x = nn.Linear(4, 4), torch.ones(1, 4)
    for _ in range(2):
        torch.autocast("cpu", dtype=torch.bfloat16).__enter__()
    layer(x)
    with torch.no_grad():
        layer.weight.zero_()
        layer.bias.zero_()
    assert layer(x).abs().sum() > 0  # the stale copy: the fault that this is about
    release_autocast()
    assert not torch.is_autocast_enabled("cpu")
    assert torch.autocast_increment_nesting() == 1
    assert torch.autocast_decrement_nesting() == 0
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(x).abs().sum() == 0


def test_a_snapshot_inside_autocast_puts_autocast_back_on():
    learn = mlp_adamw()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        snapshot = Snapshot.capture(learn)
        release_autocast()
        assert not torch.is_autocast_enabled("cpu")
        snapshot.restore(learn)
        assert torch.is_autocast_enabled("cpu")
        assert fingerprint(learn) == snapshot.fingerprint
    assert torch.autocast_increment_nesting() == 1
    torch.autocast_decrement_nesting()
