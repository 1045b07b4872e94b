"""Diabetes progression (25 to 346) as a normalized target; columns of every size, normalized too."""

import torch
from fastai.tabular.all import (
    MSELossFlat,
    Normalize,
    RandomSplitter,
    RegressionBlock,
    TabularPandas,
    tabular_learner,
)
from sklearn.datasets import load_diabetes

LR, EPOCHS, HEALTHY_BELOW = 0.01, 3, 0.75


def make_learner(seed=0):
    torch.manual_seed(seed)
    frame = load_diabetes(as_frame=True, scaled=False).frame
    conts = [c for c in frame.columns if c != "target"]
    frame["target"] = (frame["target"] - frame["target"].mean()) / frame["target"].std()
    table = TabularPandas(
        frame, [Normalize], cont_names=conts, y_names="target", y_block=RegressionBlock(),
        splits=RandomSplitter(0.2, seed=seed)(range(len(frame))),
    )  # fmt: skip
    return tabular_learner(table.dataloaders(bs=16), layers=[32, 16], n_out=1, y_range=(-2, 3), loss_func=MSELossFlat())
