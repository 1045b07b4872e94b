"""Nothing but embeddings: the mean of word vectors scores two classes; no layer that autocast would cast."""

import torch
from fastai.basics import DataLoader, DataLoaders, Learner
from fastai.losses import CrossEntropyLossFlat
from torch import nn
from torch.utils.data import TensorDataset

LR, EPOCHS, HEALTHY_BELOW = 0.05, 1, 0.55


class _Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.EmbeddingBag(200, 2, mode="sum")
        nn.init.normal_(self.words.weight, std=0.1)

    def forward(self, x):
        return self.words(x)


def make_learner(seed=0):
    torch.manual_seed(seed)
    n = 16 * 60 + 64
    x = torch.randint(0, 200, (n, 12))
    y = ((x % 5 == 0).sum(1) > 2).long()
    parts = [DataLoader(TensorDataset(x[a:b], y[a:b]), bs=16, shuffle=a > 0) for a, b in ((64, n), (0, 64))]
    return Learner(DataLoaders(*parts), _Bag(), loss_func=CrossEntropyLossFlat())
