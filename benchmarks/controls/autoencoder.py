"""A convolutional autoencoder: the input is the target, upsampling by transposed convolutions."""

import torch
from fastai.basics import DataLoader, DataLoaders, Learner
from fastai.losses import MSELossFlat
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

LR, EPOCHS, HEALTHY_BELOW = 0.01, 1, 0.12


def make_learner(seed=0):
    torch.manual_seed(seed)
    x = torch.as_tensor(load_digits().images).float()[:, None] / 16
    x = x[torch.randperm(len(x))][:832]
    parts = [DataLoader(TensorDataset(x[a:b], x[a:b]), bs=16, shuffle=a > 0) for a, b in ((64, 832), (0, 64))]
    model = nn.Sequential(
        nn.Conv2d(1, 12, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(12, 6, 3, stride=2, padding=1), nn.ReLU(),
        nn.ConvTranspose2d(6, 12, 2, stride=2), nn.ReLU(), nn.ConvTranspose2d(12, 1, 2, stride=2), nn.Sigmoid(),
    )  # fmt: skip
    return Learner(DataLoaders(*parts), model, loss_func=MSELossFlat())
