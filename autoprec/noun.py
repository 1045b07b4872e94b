"""The base of all nouns: frozen, strict about keys, JSON in and out without losing NaN or infinity.

Pure: imports no torch, no fastai. A noun never holds a tensor, only numbers, names and other nouns.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

__all__ = ["Noun"]


class Noun(BaseModel):
    """A frozen record; `model_dump_json()` and `model_validate_json()` are inverse, NaN and infinities included."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings", allow_inf_nan=True)
