"""A DynamicUnet on crops of a photograph: which pixels are bright in the original, from its noisy copy."""

import torch
import torch.nn.functional as F  # noqa: N812
from fastai.basics import DataLoader, DataLoaders, Learner
from fastai.losses import CrossEntropyLossFlat
from fastai.vision.all import DynamicUnet
from sklearn.datasets import load_sample_image
from torch import nn
from torch.utils.data import TensorDataset

LR, EPOCHS, HEALTHY_BELOW = 0.005, 1, 0.6


def make_learner(seed=0):
    torch.manual_seed(seed)
    photo = torch.tensor(load_sample_image("china.jpg")).permute(2, 0, 1).float()[None] / 255
    small = F.interpolate(photo, size=(144, 224), mode="area")[0]
    crops = small.unfold(1, 16, 8).unfold(2, 16, 8).permute(1, 2, 0, 3, 4).reshape(-1, 3, 16, 16)
    crops = crops[torch.randperm(len(crops))][:360]
    y = (crops.mean(1) > small.mean()).long()
    x = (crops - 0.5) / 0.25 + 0.3 * torch.randn_like(crops)
    parts = [DataLoader(TensorDataset(x[a:b], y[a:b]), bs=8, shuffle=a > 0) for a, b in ((24, 360), (0, 24))]
    encoder = nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
        nn.Sequential(nn.Conv2d(8, 16, 3, padding=1, stride=2), nn.BatchNorm2d(16), nn.ReLU()),
    )
    model = DynamicUnet(encoder, 2, (16, 16))
    return Learner(DataLoaders(*parts), model, loss_func=CrossEntropyLossFlat(axis=1))
