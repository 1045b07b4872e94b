"""Breast cancer tabular data with missing values filled (a category of its own each), no batch norm on the columns."""

import numpy as np
import torch
from fastai.tabular.all import (
    Categorify,
    CategoryBlock,
    FillMissing,
    Normalize,
    RandomSplitter,
    TabularPandas,
    tabular_config,
    tabular_learner,
)
from sklearn.datasets import load_breast_cancer

LR, EPOCHS, HEALTHY_BELOW = 0.01, 2, 0.3


def make_learner(seed=0):
    torch.manual_seed(seed)
    frame = load_breast_cancer(as_frame=True).frame
    conts = [c for c in frame.columns if c != "target"]
    holes = np.random.default_rng(seed).random((len(frame), 3)) < 0.1
    frame[conts[:3]] = frame[conts[:3]].mask(holes)
    table = TabularPandas(
        frame, [Categorify, FillMissing, Normalize], cont_names=conts, y_names="target", y_block=CategoryBlock(),
        splits=RandomSplitter(0.2, seed=seed)(range(len(frame))),
    )  # fmt: skip
    config = tabular_config(bn_cont=False, ps=[0.05, 0.05])
    return tabular_learner(table.dataloaders(bs=16), layers=[64, 32], config=config)
