"""A patch-attention net on scikit-learn's digits, whose pixels of 0 to 255 nobody normalized.

In fp16 the products of queries and keys leave half's range: stock `to_fp16()` trains nothing.
"""

import torch
from fastai.vision.all import CrossEntropyLossFlat, Datasets, ItemGetter, Learner, RandomSplitter, accuracy, set_seed
from sklearn.datasets import load_digits
from torch import nn

import autoprec


class PatchAttention(nn.Module):
    """One attention layer over patches of 2 by 2 pixels."""

    def __init__(self, dim: int = 96) -> None:
        super().__init__()
        self.patches, self.embed, self.qkv = nn.Unfold(2, stride=2), nn.Linear(4, dim), nn.Linear(dim, 3 * dim)
        self.norm, self.head = nn.LayerNorm(dim), nn.Sequential(nn.Linear(16 * dim, 64), nn.GELU(), nn.Linear(64, 10))

    def forward(self, images: torch.Tensor) -> torch.Tensor:  # noqa: D102
        q, k, v = self.qkv(x := self.embed(self.patches(images).transpose(1, 2))).chunk(3, dim=-1)
        attention = (q @ k.transpose(1, 2) / q.shape[-1] ** 0.5).softmax(dim=-1)
        return self.head(self.norm(x + attention @ v).flatten(1))


set_seed(0)
digits = load_digits()
images = torch.tensor(digits.images * 255 / 16)[:, None].float()
items = list(zip(images, torch.tensor(digits.target), strict=True))
split = RandomSplitter(0.2, seed=0)(items)
dls = Datasets(items, [[ItemGetter(0)], [ItemGetter(1)]], splits=split).dataloaders(bs=64)
learn = Learner(dls, PatchAttention(), CrossEntropyLossFlat(), metrics=accuracy).to_fp16()

learn = autoprec.fit_safely(learn, 8, 4e-3, emulate_cuda=True, audit="digits.jsonl", seed=0)
print(learn.autoprec.explain())
