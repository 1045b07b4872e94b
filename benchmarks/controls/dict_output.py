"""Two heads in a dictionary, a class and a value, with a loss of the user's own that weighs them."""

import torch
from fastai.basics import DataLoader, DataLoaders, Learner
from sklearn.datasets import load_wine
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import TensorDataset

LR, EPOCHS, HEALTHY_BELOW = 0.01, 5, 0.6


class _Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.LayerNorm(32))
        self.kind, self.value = nn.Linear(32, 3), nn.Linear(32, 1)

    def forward(self, x):
        h = self.body(x)
        return {"kind": self.kind(h), "value": self.value(h)}


def both(pred, kind, value):
    return F.cross_entropy(pred["kind"], kind) + 0.5 * F.smooth_l1_loss(pred["value"], value)


def make_learner(seed=0):
    torch.manual_seed(seed)
    x, kind = (torch.as_tensor(a) for a in load_wine(return_X_y=True))
    order = torch.randperm(len(x))
    x, kind = ((x - x.mean(0)) / x.std(0)).float()[order], kind[order]
    columns = (x[:, 1:], kind, x[:, :1])
    parts = [
        DataLoader(TensorDataset(*(c[a:b] for c in columns)), bs=12, shuffle=a > 0) for a, b in ((28, 178), (0, 28))
    ]
    dls = DataLoaders(*parts)
    dls.n_inp = 1
    return Learner(dls, _Heads(), loss_func=both)
