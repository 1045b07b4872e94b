"""An MLP-mixer of LayerNorms and GELUs on patches of digits, torch's AdamW through OptimWrapper."""

from functools import partial

import torch
from fastai.basics import DataLoader, DataLoaders, Learner
from fastai.losses import CrossEntropyLossFlat
from fastai.optimizer import OptimWrapper
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

LR, EPOCHS, HEALTHY_BELOW = 0.003, 1, 1.5


class _Mix(nn.Module):
    def __init__(self, places, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.across = nn.Sequential(nn.Linear(places, 2 * places), nn.GELU(), nn.Linear(2 * places, places))
        self.within = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        x = x + self.across(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.within(self.norm2(x))


def make_learner(seed=0):
    torch.manual_seed(seed)
    x, y = (torch.as_tensor(a) for a in load_digits(return_X_y=True))
    x = ((x.float() - 4.9) / 6.0).reshape(-1, 8, 8).unfold(1, 2, 2).unfold(2, 2, 2).reshape(-1, 16, 4)
    parts = [DataLoader(TensorDataset(x[a:b], y[a:b]), bs=16, shuffle=a > 0) for a, b in ((64, 832), (0, 64))]
    model = nn.Sequential(
        nn.Linear(4, 24), _Mix(16, 24), _Mix(16, 24), nn.LayerNorm(24), nn.Flatten(), nn.Linear(384, 10)
    )
    opt = partial(OptimWrapper, opt=torch.optim.AdamW)
    return Learner(DataLoaders(*parts), model, loss_func=CrossEntropyLossFlat(), opt_func=opt)
