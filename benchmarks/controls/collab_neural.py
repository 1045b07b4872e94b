"""`collab_learner(use_nn=True)`: ratings by a small net on two embeddings."""

import numpy as np
import pandas as pd
import torch
from fastai.collab import CollabDataLoaders, collab_learner

LR, EPOCHS, HEALTHY_BELOW = 0.01, 2, 1.2


def make_learner(seed=0):
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    u, i = rng.integers(40, size=900), rng.integers(60, size=900)
    value = np.clip(3 + rng.normal(size=40)[u] + rng.normal(size=60)[i], 0.5, 5)
    frame = pd.DataFrame({"user": u, "item": i, "rating": value.astype(np.float32)})
    dls = CollabDataLoaders.from_df(frame, seed=seed, bs=16)
    return collab_learner(dls, use_nn=True, layers=[32, 16], y_range=(0, 5.5))
