"""Two inputs through one net, compared by the distance of their embeddings: a contrastive loss with a margin."""

import torch
from fastai.basics import DataLoader, DataLoaders, Learner
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import TensorDataset

LR, EPOCHS, HEALTHY_BELOW = 0.003, 1, 0.3


class _Siamese(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 8))

    def forward(self, a, b):
        return self.body(a), self.body(b)


def contrastive(pred, same):
    distance = F.pairwise_distance(*pred)
    return (same * distance**2 + (1 - same) * (1 - distance).clamp(min=0) ** 2).mean()


def make_learner(seed=0):
    torch.manual_seed(seed)
    x, y = (torch.as_tensor(a) for a in load_digits(return_X_y=True))
    x, first = (x.float() - 4.9) / 6, torch.randperm(len(x))[:832]
    partner = [(y == y[i]).nonzero()[:, 0] if k % 2 else (y != y[i]).nonzero()[:, 0] for k, i in enumerate(first)]
    second = torch.stack([p[torch.randint(len(p), ())] for p in partner])
    columns = (x[first], x[second], (y[first] == y[second]).float())
    parts = [
        DataLoader(TensorDataset(*(c[a:b] for c in columns)), bs=16, shuffle=a > 0) for a, b in ((64, 832), (0, 64))
    ]
    return Learner(DataLoaders(*parts), _Siamese(), loss_func=contrastive)
