"""CutMix, with SGD and momentum."""

from functools import partial

import torch
from fastai.basics import DataLoader, DataLoaders, Learner
from fastai.callback.mixup import CutMix
from fastai.losses import CrossEntropyLossFlat
from fastai.optimizer import SGD
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

LR, EPOCHS, HEALTHY_BELOW = 0.05, 1, 2.0


def make_learner(seed=0):
    torch.manual_seed(seed)
    x, y = (torch.as_tensor(a) for a in load_digits(return_X_y=True))
    x = ((x.float() - 4.9) / 6.0).reshape(-1, 1, 8, 8)
    parts = [DataLoader(TensorDataset(x[a:b], y[a:b]), bs=16, shuffle=a > 0) for a, b in ((64, 832), (0, 64))]
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 10)
    )
    opt = partial(SGD, mom=0.9)
    return Learner(DataLoaders(*parts), model, loss_func=CrossEntropyLossFlat(), opt_func=opt, cbs=CutMix(1.0))
