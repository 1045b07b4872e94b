"""CTC over a bidirectional GRU: short label sequences in longer noisy inputs, blanks in between."""

import torch
from fastai.basics import DataLoader, DataLoaders, Learner
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import TensorDataset

LR, EPOCHS, HEALTHY_BELOW = 0.01, 2, 1.6
LENGTH, LABELS, KINDS = 12, 3, 5


class _Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.GRU(8, 24, batch_first=True, bidirectional=True), nn.Linear(48, KINDS + 1)

    def forward(self, x):
        return self.head(self.rnn(x)[0])


def ctc(out, target):
    log_p = out.log_softmax(-1).transpose(0, 1)
    inputs, targets = torch.full((len(target),), LENGTH), torch.full((len(target),), LABELS)
    return F.ctc_loss(log_p, target, inputs, targets, zero_infinity=True)


def make_learner(seed=0):
    torch.manual_seed(seed)
    n = 16 * 30 + 32
    y = torch.randint(1, KINDS + 1, (n, LABELS))
    x = torch.randn(KINDS + 1, 8)[y].repeat_interleave(LENGTH // LABELS, 1) + 0.2 * torch.randn(n, LENGTH, 8)
    parts = [DataLoader(TensorDataset(x[a:b], y[a:b]), bs=16, shuffle=a > 0) for a, b in ((32, n), (0, 32))]
    return Learner(DataLoaders(*parts), _Reader(), loss_func=ctc)
