"""`vision_learner` with a body of its own: fastai's head on top, the body frozen, discriminative parameter groups."""

import torch
from fastai.basics import DataLoader, DataLoaders
from fastai.losses import CrossEntropyLossFlat
from fastai.vision.all import vision_learner
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

LR, EPOCHS, HEALTHY_BELOW = 0.02, 1, 1.6


def body(**_kwargs):
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, stride=2), nn.BatchNorm2d(32), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Linear(32, 1000),
    )  # fmt: skip


def make_learner(seed=0):
    torch.manual_seed(seed)
    x, y = (torch.as_tensor(a) for a in load_digits(return_X_y=True))
    x = ((x.float() - 4.9) / 6.0).reshape(-1, 1, 8, 8).repeat(1, 3, 1, 1)
    parts = [DataLoader(TensorDataset(x[a:b], y[a:b]), bs=16, shuffle=a > 0) for a, b in ((64, 832), (0, 64))]
    learn = vision_learner(
        DataLoaders(*parts), body, pretrained=False, cut=-2, n_out=10, loss_func=CrossEntropyLossFlat(), lin_ftrs=[32],
        ps=0.1, normalize=False,
    )  # fmt: skip
    learn.freeze()
    return learn
