"""`tabular_learner` on wines: two categorical columns, eleven normalized continuous ones, batch norm on both."""

import torch
from fastai.tabular.all import (
    Categorify,
    CategoryBlock,
    FillMissing,
    Normalize,
    RandomSplitter,
    TabularPandas,
    tabular_learner,
)
from sklearn.datasets import load_wine

LR, EPOCHS, HEALTHY_BELOW = 0.01, 6, 0.5


def make_learner(seed=0):
    torch.manual_seed(seed)
    frame = load_wine(as_frame=True).frame
    frame["strong"] = (frame["alcohol"] > 13).map({True: "yes", False: "no"})
    frame["tint"] = (frame["hue"] * 4).round().astype(int).astype(str)
    conts = [c for c in frame.columns if c not in ("target", "strong", "tint", "alcohol", "hue")]
    table = TabularPandas(
        frame, [Categorify, FillMissing, Normalize], cat_names=["strong", "tint"], cont_names=conts,
        y_names="target", y_block=CategoryBlock(), splits=RandomSplitter(0.2, seed=seed)(range(len(frame))),
    )  # fmt: skip
    dls = table.dataloaders(bs=16)
    return tabular_learner(dls, layers=[32, 16])
