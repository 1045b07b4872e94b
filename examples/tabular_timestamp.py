"""A table with a timestamp in seconds among its columns, and no Normalize among its procs.

The net's first layer leaves half's range: stock `to_fp16()` trains nothing.
"""

import numpy as np
from fastai.tabular.all import (
    CategoryBlock,
    FillMissing,
    TabularDataLoaders,
    accuracy,
    set_seed,
    tabular_config,
    tabular_learner,
)
from sklearn.datasets import load_breast_cancer

import autoprec

set_seed(0)
table = load_breast_cancer(as_frame=True).frame
days = np.random.default_rng(0).integers(0, 3000, len(table))
table["examined_at"] = 1_500_000_000 + 86_400 * days  # seconds since 1970

columns = [c for c in table.columns if c != "target"]
dls = TabularDataLoaders.from_df(
    table, procs=[FillMissing], cont_names=columns, y_names="target", y_block=CategoryBlock(), bs=32
)
learn = tabular_learner(dls, layers=[64, 32], config=tabular_config(bn_cont=False), metrics=accuracy).to_fp16()

learn = autoprec.fit_safely(learn, 5, 1e-2, emulate_cuda=True, audit="tabular.jsonl", seed=0)
print(learn.autoprec.explain())
