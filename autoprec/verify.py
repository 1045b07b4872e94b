"""Is this leg healthy? The one judge, used on the user's run, on every attempt and on the finished fit.

Healthy means: every loss finite, weights, buffers and validation finite, steps really taken, and no worse
than the fp32 twin beyond noise. A finite last loss proves nothing: a run whose every step is skipped has one.

Pure: evidence in, `Verdict` out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from autoprec.evidence import Comparison, Evidence, Leg
from autoprec.ledger import Skips

if TYPE_CHECKING:
    from autoprec.outcome import Verdict
    from autoprec.policy import Limits

__all__ = ["close_call", "compare", "describe_failure", "diverged", "excess", "judge", "trains", "worse"]


def excess(loss: float, twin: float, start: float) -> float:
    """(loss - twin) / max(|twin|, |start - twin|); 0 where all three are 0, NaN where one is NaN."""
    if math.isnan(loss) or math.isnan(twin) or math.isnan(start):
        return math.nan  # said first: max() and copysign() of a NaN depend on its place and sign
    scale = max(abs(twin), abs(start - twin))
    if scale == 0.0:
        return 0.0 if loss == twin else math.copysign(math.inf, loss - twin)
    return (loss - twin) / scale


def compare(
    main: Leg,
    twin: Leg,
    perturbed: Sequence[Leg] = (),
    main_perturbed: Sequence[Leg] = (),
    *,
    same_steps: bool = True,
) -> Comparison:
    """Put the main leg beside its twin.

    Args:
        main: the leg in question.
        twin: its fp32 twin.
        perturbed: fp32 legs from slightly perturbed weights: how much fp32 itself scatters.
        main_perturbed: the same in the main leg's precision.
        same_steps: the twin took the very steps that the main leg took.
    """
    start = twin.steps[0].loss if twin.steps else math.nan
    spread = _largest(excess(p.final_loss, twin.final_loss, start) for p in perturbed)
    least = _least([main, *main_perturbed], [twin, *perturbed], start, lambda leg: leg.final_loss)
    validation = spread_validation = least_validation = None
    if main.validation_loss is not None and twin.validation_loss is not None:
        validation = excess(main.validation_loss, twin.validation_loss, start)
        spread_validation = _largest(
            excess(p.validation_loss, twin.validation_loss, start) for p in perturbed if p.validation_loss is not None
        )
        least_validation = _least([main, *main_perturbed], [twin, *perturbed], start, lambda leg: leg.validation_loss)
    return Comparison(
        excess=excess(main.final_loss, twin.final_loss, start),
        excess_validation=validation,
        spread=spread,
        spread_validation=spread_validation,
        stuck=main.param_change == 0.0 and (twin.param_change or 0.0) > 0.0,
        least=least if main_perturbed else None,
        least_validation=least_validation if main_perturbed else None,
        same_steps=same_steps,
    )


def _least(
    mains: Sequence[Leg], twins: Sequence[Leg], start: float, loss: Callable[[Leg], float | None]
) -> float | None:
    """Excess of the best of `mains` over the worst of `twins`; a leg that got nowhere (NaN) does not count."""
    ours = [v for leg in mains if (v := loss(leg)) is not None and not math.isnan(v)]
    theirs = [v for leg in twins if (v := loss(leg)) is not None and not math.isnan(v)]
    return excess(min(ours), max(theirs), start) if ours and theirs else None


def _largest(excesses: Iterable[float]) -> float | None:
    """The largest magnitude; a leg that got nowhere (NaN) tells nothing of how much fp32 scatters."""
    return max((abs(e) for e in excesses if not math.isnan(e)), default=None)


def worse(comparison: Comparison, limits: Limits) -> str | None:
    """The reason why the main leg is worse than its twin beyond noise, or None if it is not.

    Two tests of chance must both fail: the excess beyond a multiple of fp32's own spread, and the best perturbed 16-bit
    leg above the worst perturbed fp32 leg by the floor. Weights that stand still where fp32's move need no such test.
    """
    if comparison.stuck:
        return "no weight moves, and the fp32 twin's do"
    for what, value, spread, least in (
        ("training", comparison.excess, comparison.spread, comparison.least),
        ("validation", comparison.excess_validation, comparison.spread_validation, comparison.least_validation),
    ):
        if value is None:
            continue
        allowed = max(limits.worse_floor, limits.worse_spread * (spread or 0.0))
        if least is not None and least <= limits.worse_floor:
            continue
        if not value <= allowed:
            return f"the {what} loss is {value:.1%} above the fp32 twin's (noise allows {allowed:.1%})"
    return None


def close_call(comparison: Comparison, limits: Limits) -> bool:
    """Whether an excess is above the noise seen so far, but by less than three times what is allowed."""
    wider = limits.model_copy(
        update={"worse_floor": min(1.0, 3 * limits.worse_floor), "worse_spread": 3 * limits.worse_spread}
    )
    return worse(comparison, limits) is not None and worse(comparison, wider) is None


def diverged(leg: Leg, limits: Limits) -> bool:
    """Whether the loss, though finite, ended far above where it began."""
    if not leg.steps:
        return False
    first = leg.steps[0].loss
    return leg.final_loss > first + (limits.divergence - 1) * max(abs(first), 1e-12)


def trains(leg: Leg, limits: Limits) -> bool:
    """Whether a leg stayed finite and its loss fell by at least the policy's least progress."""
    if leg.failure is not None or not leg.steps or diverged(leg, limits):
        return False
    first = leg.steps[0].loss
    return first - leg.final_loss >= limits.progress * max(abs(first), 1e-12)


def describe_failure(leg: Leg) -> str:
    """What went wrong first in a leg, in words."""
    f = leg.failure
    if f is None:
        return "nothing failed"
    if f.where == "exception":
        return f"step {f.step} raised {f.error}"
    names = f" ({', '.join(f.names[:3])})" if f.names else ""
    return f"the {f.where}{names} is not finite at step {f.step}"


def judge(evidence: Evidence, limits: Limits) -> Verdict:
    """Judge the main leg.

    Returns:
        The verdict; its `excess` is the comparison's where there is one.
    """
    from autoprec.outcome import Verdict  # late: an outcome holds a diagnosis, whose rules read this module

    main = evidence.main
    value = evidence.comparison.excess if evidence.comparison else None
    if main is None or (not main.steps and main.failure is None):
        return Verdict(healthy=False, reason="no step was made")
    reason = _unhealthy(main, evidence, limits)
    if reason is not None:
        return Verdict(healthy=False, reason=reason, excess=value)
    taken = len(main.taken)
    beside = f", loss {value:+.1%} beside the fp32 twin's" if value is not None else ""
    return Verdict(
        healthy=True,
        reason=f"{taken} of {len(main.steps)} steps taken, all finite, loss {main.final_loss:.4g}{beside}",
        excess=value,
    )


def _unhealthy(main: Leg, evidence: Evidence, limits: Limits) -> str | None:  # noqa: PLR0911  # one line per reason
    if main.failure is not None:
        return describe_failure(main)
    if main.poisoned_buffers:
        return f"buffers are not finite: {', '.join(main.poisoned_buffers[:3])}"
    skips = Skips.of(main.steps)
    planned = evidence.configuration.planned_steps
    # Without a scaler a step is left out by a callback of the user's, on purpose: that is no fault.
    scaled = skips.last_scale is not None
    if scaled and (skips.chronic(limits) or skips.share_of(planned) > limits.run_skip_rate):
        skipped = f"{skips.skipped} of {skips.attempted} steps were skipped{skips.late_words()}"
        return f"{skipped} and the loss scale ended at {skips.last_scale:g}"
    if not main.taken:
        return f"none of {skips.attempted} steps was taken"
    if diverged(main, limits):
        return f"the loss rose from {main.steps[0].loss:.4g} to {main.final_loss:.4g}"
    if evidence.comparison is not None:
        return worse(evidence.comparison, limits)
    return None
