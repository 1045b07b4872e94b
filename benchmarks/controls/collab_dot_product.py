"""`collab_learner`: ratings from 0.5 to 5 by the dot product of two embeddings with biases, scaled by a sigmoid."""

import numpy as np
import pandas as pd
import torch
from fastai.collab import CollabDataLoaders, collab_learner

LR, EPOCHS, HEALTHY_BELOW = 0.05, 2, 1.0


def ratings(seed, n=900):
    rng = np.random.default_rng(seed)
    users, items = rng.normal(size=(40, 3)), rng.normal(size=(60, 3))
    u, i = rng.integers(40, size=n), rng.integers(60, size=n)
    value = np.clip(3 + 0.7 * (users[u] * items[i]).sum(1) + 0.3 * rng.normal(size=n), 0.5, 5)
    return pd.DataFrame({"user": u, "item": i, "rating": value.astype(np.float32)})


def make_learner(seed=0):
    torch.manual_seed(seed)
    dls = CollabDataLoaders.from_df(ratings(seed), seed=seed, bs=16)
    return collab_learner(dls, n_factors=8, y_range=(0, 5.5))
