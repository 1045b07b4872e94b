"""Several labels per sample: BCEWithLogits with a positive weight, mostly zeros."""

import torch
from fastai.basics import DataLoader, DataLoaders, Learner
from fastai.losses import BCEWithLogitsLossFlat
from fastai.metrics import accuracy_multi
from torch import nn
from torch.utils.data import TensorDataset

LR, EPOCHS, HEALTHY_BELOW = 0.01, 1, 0.6


def make_learner(seed=0):
    torch.manual_seed(seed)
    n = 16 * 45 + 64
    x = torch.randn(n, 16)
    y = (x @ torch.randn(16, 6) > 4).float()
    parts = [DataLoader(TensorDataset(x[a:b], y[a:b]), bs=16, shuffle=a > 0) for a, b in ((64, n), (0, 64))]
    model = nn.Sequential(nn.Linear(16, 48), nn.SiLU(), nn.Dropout(0.1), nn.Linear(48, 6))
    loss = BCEWithLogitsLossFlat(pos_weight=torch.tensor(3.0))
    return Learner(DataLoaders(*parts), model, loss_func=loss, metrics=accuracy_multi)
