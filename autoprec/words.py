"""How numbers are said to people: in the log, in the report, on the terminal. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autoprec.evidence import LegSpec

__all__ = ["count", "duration", "number", "scale", "setting", "share", "spec"]


def number(value: float | None) -> str:
    """Short: `0.1235`, `65504`, `1.235e+08`, `NaN`, `-inf`; `-` for None."""
    if value is None:
        return "-"
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    # The range of half and a little beyond is where overflows are discussed: in full, 65504 beside 131769.
    return f"{value:.0f}" if 1e4 <= abs(value) < 1e7 else f"{value:.4g}"


def scale(value: float | None) -> str:
    """A loss scale: `2^16` for powers of two, else the number; `-` for None."""
    if value is None or not math.isfinite(value) or value <= 0:
        return number(value)
    mantissa, exponent = math.frexp(value)
    return f"2^{exponent - 1}" if mantissa == 0.5 else number(value)


def share(value: float) -> str:
    """A share in percent, three digits at most: `12.5 %`; a NaN stays `NaN`."""
    return f"{100 * value:.3g} %" if math.isfinite(value) else number(value)


def count(n: int, singular: str, plural: str | None = None) -> str:
    """`1 step`, `2 steps`."""
    return f"{n:,} {singular if n == 1 else plural or singular + 's'}"


def duration(seconds: float | None) -> str:
    """`0.3 s`, `12 s`, `3 min 20 s`, `2 h 5 min`; `-` for None."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def setting(value: Any) -> str:
    """A value of a setting, as in a change: numbers short, everything else as it is."""
    if value is None:
        return "none"
    if isinstance(value, float):
        return number(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{k}={setting(v)}" for k, v in value.items()) or "none"
    if isinstance(value, (list, tuple)):
        return ", ".join(setting(v) for v in value) or "none"
    return str(value)


def spec(leg: LegSpec) -> str:
    """What a leg ran in: the precision and whatever differs from the user's own settings."""
    parts: list[str] = [leg.precision]
    if leg.lr_factor != 1.0:
        parts.append(f"lr x {number(leg.lr_factor)}")
    if leg.clip is not None:
        parts.append(f"clip {number(leg.clip)}")
    if leg.init_scale is not None:
        parts.append(f"scale from {scale(leg.init_scale)}")
    if leg.perturb_seed is not None:
        parts.append("weights perturbed")
    return ", ".join(parts)
