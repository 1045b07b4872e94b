"""Short fits over plain tensors, for the tests of what watches a fit."""

from __future__ import annotations

import random
import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # fastai's own imports
    import fastai.callback.schedule  # noqa: F401
    from fastai.callback.core import Callback
    from fastai.callback.progress import ProgressCallback
    from fastai.data.core import DataLoaders
    from fastai.data.load import DataLoader
    from fastai.learner import Learner
    from fastai.losses import CrossEntropyLossFlat
    from fastai.optimizer import SGD

from faults import say_nothing

from autoprec.evidence import Leg, LegSpec, Precision
from autoprec.observe.leg import LegRun, run_leg
from autoprec.precision import Setting
from autoprec.schedule import FitPlan
from autoprec.snapshot import preserved, release_autocast

BS = 4


def seed_all(seed: int = 0) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def fitted(
    *tensors: Tensor,
    model: nn.Module | None = None,
    loss: Any = None,
    bs: int = BS,
    valid: int = 2 * BS,
    shuffle: bool = False,
    **kwargs: Any,
) -> Learner:
    """A learner over rows of tensors, the last `valid` of them held out; plain SGD without a bar."""
    train, held = TensorDataset(*[t[:-valid] for t in tensors]), TensorDataset(*[t[-valid:] for t in tensors])
    dls = DataLoaders(DataLoader(train, bs=bs, shuffle=shuffle), DataLoader(held, bs=bs))
    dls.device = torch.device("cpu")
    model = nn.Sequential(nn.Linear(tensors[0].shape[1], 3)) if model is None else model
    learn = Learner(
        dls, model, loss_func=CrossEntropyLossFlat() if loss is None else loss, **{"opt_func": SGD, **kwargs}
    )
    learn.remove_cb(ProgressCallback)
    learn.logger, learn.create_mbar = say_nothing, False
    return learn


def classified(batches: int = 10, width: int = 5) -> tuple[Tensor, Tensor]:
    """Rows of noise with one of three classes each; two more batches to hold out."""
    generator = torch.Generator().manual_seed(1)
    n = (batches + 2) * BS
    return torch.randn(n, width, generator=generator), torch.randint(0, 3, (n,), generator=generator)


def leg(
    learn: Learner,
    *quotas: int,
    precision: Precision = "fp32",
    plan: FitPlan | None = None,
    setting: Setting | None = None,
    validation: int = 0,
    run: LegRun | None = None,
    inside: Any = None,
    **spec: Any,
) -> Leg:
    """One leg, put back afterwards; `inside` is called before that."""
    run = run or LegRun(LegSpec(precision=precision, **spec), quotas, validation)
    plan = plan or FitPlan("fit", 1, 0.1)
    with preserved(learn):
        release_autocast()
        found = run_leg(learn, plan, setting or Setting(precision), run)
        if inside is not None:
            inside()
    return found


class Recording(Callback):
    """Notes inputs, learning rate and weights of each training batch."""

    order = 900

    def __init__(self) -> None:
        self.inputs_seen: list[Tensor] = []
        self.lrs_seen: list[float] = []
        self.weights_seen: list[list[Tensor]] = []

    def before_batch(self) -> None:
        if self.training:
            self.inputs_seen.append(self.xb[0].clone())
            self.lrs_seen.append(float(self.opt.hypers[-1]["lr"]))
            self.weights_seen.append([p.detach().clone() for p in self.model.parameters()])
