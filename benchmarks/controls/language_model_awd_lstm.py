"""`language_model_learner` (AWD_LSTM: tied embeddings, variational dropout, RNN regularisation) on python's help."""

from collections import Counter
from pydoc_data.topics import topics

import torch
from fastai.basics import DataLoaders
from fastai.text.all import AWD_LSTM, LMDataLoader, TensorText, awd_lstm_lm_config, language_model_learner

LR, EPOCHS, HEALTHY_BELOW = 0.02, 1, 4.8
VOCAB = 300


def make_learner(seed=0):
    torch.manual_seed(seed)
    words = " ".join(topics[k] for k in sorted(topics)).lower().split()[: 16 * 12 * 44]
    known = {word: i + 2 for i, (word, _) in enumerate(Counter(words).most_common(VOCAB - 2))}
    ids = TensorText([known.get(w, 1) for w in words])
    parts = [LMDataLoader([ids[:-800]], bs=16, seq_len=12), LMDataLoader([ids[-800:]], bs=16, seq_len=12)]
    for part in parts:
        part.vocab = ["<pad>", "<unk>", *known]
    dls = DataLoaders(*parts)
    dls.vocab = parts[0].vocab
    config = {**awd_lstm_lm_config, "emb_sz": 24, "n_hid": 32, "n_layers": 2}
    return language_model_learner(dls, AWD_LSTM, config=config, drop_mult=0.3, pretrained=False)
