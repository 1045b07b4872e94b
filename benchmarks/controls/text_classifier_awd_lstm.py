"""ULMFiT's classifier (AWD_LSTM, all its dropouts, pooling over chunks) on two topics of python's help."""

from collections import Counter
from pydoc_data.topics import topics

import torch
from fastai.basics import DataLoader, DataLoaders
from fastai.losses import CrossEntropyLossFlat
from fastai.text.all import AWD_LSTM, TextLearner, awd_lstm_clas_config, awd_lstm_clas_split, get_text_classifier

LR, EPOCHS, HEALTHY_BELOW = 0.01, 1, 0.68
VOCAB, LENGTH = 400, 24


def make_learner(seed=0):
    torch.manual_seed(seed)
    texts = [topics[name].lower().split() for name in ("specialnames", "formatstrings")]
    counts = Counter(word for words in texts for word in words)
    known = {word: i + 2 for i, (word, _) in enumerate(counts.most_common(VOCAB - 2))}
    pieces = [
        (torch.tensor([known.get(w, 1) for w in words[i : i + LENGTH]]), torch.tensor(kind))
        for kind, words in enumerate(texts)
        for i in range(0, len(words) - LENGTH, LENGTH // 2)
    ]
    pieces = [pieces[i] for i in torch.randperm(len(pieces))[:672]]
    parts = [DataLoader(pieces[a:b], bs=16, shuffle=a > 0) for a, b in ((32, 672), (0, 32))]
    config = {**awd_lstm_clas_config, "emb_sz": 24, "n_hid": 32, "n_layers": 2, "bidir": False}
    model = get_text_classifier(AWD_LSTM, VOCAB, 2, seq_len=12, config=config, drop_mult=0.3, max_len=LENGTH, pad_idx=0)
    return TextLearner(
        DataLoaders(*parts), model, splitter=awd_lstm_clas_split, loss_func=CrossEntropyLossFlat(), moms=(0.8, 0.7, 0.8)
    )
