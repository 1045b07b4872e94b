"""Versions, platform and device: what one needs to judge whether another machine would do the same."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastai.learner import Learner

__all__ = ["environment"]

_PACKAGES = ("autoprec", "fastai", "fastcore", "torch", "numpy")


def environment(learn: Learner) -> dict[str, Any]:
    """Read the environment that a learner trains in."""
    import torch

    from autoprec.precision import device_type

    device = device_type(learn)
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "unknown"
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        **versions,
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "threads": torch.get_num_threads(),
        "model": type(learn.model).__name__,
        "parameters": sum(p.numel() for p in learn.model.parameters()),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
    }
