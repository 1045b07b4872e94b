"""An LSTM that forecasts the next value of a sum of sines, Huber loss, plain SGD with momentum."""

from functools import partial

import torch
from fastai.basics import DataLoader, DataLoaders, Learner
from fastai.optimizer import SGD
from torch import nn
from torch.utils.data import TensorDataset

LR, EPOCHS, HEALTHY_BELOW = 0.1, 1, 0.12


class _Forecast(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.LSTM(1, 24, batch_first=True), nn.Linear(24, 1)

    def forward(self, x):
        return self.head(self.rnn(x)[0][:, -1])


def make_learner(seed=0):
    torch.manual_seed(seed)
    n = 16 * 60 + 64
    t = torch.arange(17)[None] * 0.4 + torch.rand(n, 1) * 40
    wave = torch.sin(t) + 0.5 * torch.sin(0.37 * t)
    x, y = wave[:, :-1, None], wave[:, -1:]
    parts = [DataLoader(TensorDataset(x[a:b], y[a:b]), bs=16, shuffle=a > 0) for a, b in ((64, n), (0, 64))]
    return Learner(DataLoaders(*parts), _Forecast(), loss_func=nn.HuberLoss(), opt_func=partial(SGD, mom=0.9))
