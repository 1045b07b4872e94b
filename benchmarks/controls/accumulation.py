"""GradientAccumulation over four batches of 4, and clipping after it: three of four batches take no step on purpose."""

import torch
from fastai.basics import DataLoader, DataLoaders, Learner
from fastai.callback.training import GradientAccumulation, GradientClip
from fastai.losses import CrossEntropyLossFlat
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

LR, EPOCHS, HEALTHY_BELOW, MAX_SKIP = 0.01, 1, 1.9, 0.9


def make_learner(seed=0):
    torch.manual_seed(seed)
    x, y = (torch.as_tensor(a) for a in load_digits(return_X_y=True))
    x = (x.float() - 4.9) / 6.0
    parts = [DataLoader(TensorDataset(x[a:b], y[a:b]), bs=4, shuffle=a > 0) for a, b in ((64, 832), (0, 64))]
    model = nn.Sequential(nn.Linear(64, 48), nn.LayerNorm(48), nn.ReLU(), nn.Linear(48, 10))
    cbs = [GradientAccumulation(16), GradientClip(1.0)]
    return Learner(DataLoaders(*parts), model, loss_func=CrossEntropyLossFlat(), cbs=cbs)
