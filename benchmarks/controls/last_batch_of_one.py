"""The last batch of each epoch holds one sample; no batch norm, so that this is fine."""

import torch
from fastai.basics import DataLoader, DataLoaders, Learner
from fastai.losses import CrossEntropyLossFlat
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

LR, EPOCHS, HEALTHY_BELOW = 0.005, 2, 1.0


def make_learner(seed=0):
    torch.manual_seed(seed)
    x, y = (torch.as_tensor(a) for a in load_digits(return_X_y=True))
    x = (x.float() - 4.9) / 6.0
    parts = [
        DataLoader(TensorDataset(x[a:b], y[a:b]), bs=16, shuffle=a > 0) for a, b in ((64, 64 + 16 * 30 + 1), (0, 64))
    ]
    model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Dropout(0.2), nn.Linear(48, 10))
    return Learner(DataLoaders(*parts), model, loss_func=CrossEntropyLossFlat())
