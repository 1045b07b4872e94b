"""A next-symbol model whose output layer is its embedding, with a layer applied twice and checkpointed."""

import torch
from fastai.basics import DataLoader, DataLoaders, Learner
from fastai.losses import CrossEntropyLossFlat
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

LR, EPOCHS, HEALTHY_BELOW = 0.01, 1, 2.3


class _Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.mix, self.norm = nn.Embedding(16, 24), nn.Linear(24, 24), nn.LayerNorm(24)
        self.out = nn.Linear(24, 16)
        self.out.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=0.3)

    def layer(self, h):
        return h + self.mix(self.norm(h)).relu()

    def forward(self, x):
        h = self.embed(x)
        h = checkpoint(self.layer, self.layer(h), use_reentrant=False)
        return self.out(h)


def make_learner(seed=0):
    torch.manual_seed(seed)
    n = 16 * 50 + 64
    chain = torch.full((16, 16), 0.3).scatter_(1, torch.randperm(16)[:, None], 12.0)
    steps = [torch.randint(0, 16, (n,))]
    for _ in range(8):
        steps.append(torch.multinomial(chain[steps[-1]], 1)[:, 0])
    x = torch.stack(steps, 1)
    parts = [DataLoader(TensorDataset(x[a:b, :-1], x[a:b, 1:]), bs=16, shuffle=a > 0) for a, b in ((64, n), (0, 64))]
    return Learner(DataLoaders(*parts), _Tied(), loss_func=CrossEntropyLossFlat())
