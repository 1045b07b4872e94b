"""Losses that take care of themselves: dice and focal terms from float32 probabilities with an epsilon that holds."""

import torch
from fastai.basics import DataLoader, DataLoaders, Learner
from torch import nn
from torch.utils.data import TensorDataset

LR, EPOCHS, HEALTHY_BELOW = 0.02, 1, 0.75


def both(out, target):
    p = out.float().sigmoid().clamp(1e-6, 1 - 1e-6)
    dice = 1 - (2 * (p * target).sum((1, 2, 3)) + 1) / (p.sum((1, 2, 3)) + target.sum((1, 2, 3)) + 1)
    focal = -(target * (1 - p) ** 2 * p.log() + (1 - target) * p**2 * (1 - p).log())
    return dice.mean() + focal.mean()


def make_learner(seed=0):
    torch.manual_seed(seed)
    n = 8 * 60 + 32
    y = torch.nn.functional.interpolate((torch.rand(n, 1, 4, 4) > 0.6).float(), scale_factor=4)
    x = y + 0.5 * torch.randn_like(y)
    parts = [DataLoader(TensorDataset(x[a:b], y[a:b]), bs=8, shuffle=a > 0) for a, b in ((32, n), (0, 32))]
    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 1, 3, padding=1))
    return Learner(DataLoaders(*parts), model, loss_func=both)
