"""Digits as images are read: DataBlock, PIL, Resize, augmentation and Normalize, a small convolutional net."""

import numpy as np
import torch
from fastai.vision.all import (
    CategoryBlock,
    CrossEntropyLossFlat,
    DataBlock,
    ImageBlock,
    IndexSplitter,
    Learner,
    Normalize,
    PILImageBW,
    Resize,
    aug_transforms,
)
from sklearn.datasets import load_digits
from torch import nn

LR, EPOCHS, HEALTHY_BELOW = 0.01, 1, 1.7


def make_learner(seed=0):
    torch.manual_seed(seed)
    images, labels = load_digits(return_X_y=True)
    images = (images.reshape(-1, 8, 8) * 15.9).astype(np.uint8)
    block = DataBlock(
        blocks=(ImageBlock(PILImageBW), CategoryBlock),
        get_x=lambda i: images[i],
        get_y=lambda i: int(labels[i]),
        splitter=IndexSplitter(range(64)),
        item_tfms=Resize(12),
        batch_tfms=[*aug_transforms(do_flip=False, max_rotate=5, size=12), Normalize.from_stats([0.3], [0.37])],
    )
    dls = block.dataloaders(list(range(432)), bs=8, num_workers=0)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(2),
        nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip
    return Learner(dls, model, loss_func=CrossEntropyLossFlat())
