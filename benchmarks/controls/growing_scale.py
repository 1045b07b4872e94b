"""A scale that grows every 30 steps from 2**21, so that it is too high again and again; and one loud batch."""

import torch
from fastai.basics import DataLoader, DataLoaders, Learner
from fastai.losses import CrossEntropyLossFlat
from sklearn.datasets import load_breast_cancer
from torch import nn
from torch.utils.data import TensorDataset

LR, EPOCHS, HEALTHY_BELOW = 0.003, 3, 0.4
SCALER_KW = {"init_scale": 2.0**21, "growth_interval": 30}


def make_learner(seed=0):
    torch.manual_seed(seed)
    x, y = (torch.as_tensor(a) for a in load_breast_cancer(return_X_y=True))
    order = torch.randperm(len(x))
    x, y = ((x - x.mean(0)) / x.std(0)).float()[order], y[order]
    x[400] *= 20
    parts = [DataLoader(TensorDataset(x[a:b], y[a:b]), bs=16, shuffle=False) for a, b in ((64, 569), (0, 64))]
    model = nn.Sequential(nn.Linear(30, 32), nn.ReLU(), nn.Linear(32, 2))
    return Learner(DataLoaders(*parts), model, loss_func=CrossEntropyLossFlat())
