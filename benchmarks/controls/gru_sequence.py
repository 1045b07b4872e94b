"""A two-layer GRU over noisy sequences that must remember what came first."""

import torch
from fastai.basics import DataLoader, DataLoaders, Learner
from fastai.callback.training import GradientClip
from fastai.losses import CrossEntropyLossFlat
from torch import nn
from torch.utils.data import TensorDataset

LR, EPOCHS, HEALTHY_BELOW = 0.01, 1, 0.9


class _Remembers(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.GRU(6, 32, num_layers=2, dropout=0.1, batch_first=True), nn.Linear(32, 4)

    def forward(self, x):
        return self.head(self.rnn(x)[0][:, -1])


def make_learner(seed=0):
    torch.manual_seed(seed)
    n = 16 * 60 + 64
    y = torch.randint(0, 4, (n,))
    x = 0.3 * torch.randn(n, 8, 6)
    x[:, :3] += torch.randn(4, 6)[y][:, None]
    parts = [DataLoader(TensorDataset(x[a:b], y[a:b]), bs=16, shuffle=a > 0) for a, b in ((64, n), (0, 64))]
    return Learner(DataLoaders(*parts), _Remembers(), loss_func=CrossEntropyLossFlat(), cbs=GradientClip(1.0))
