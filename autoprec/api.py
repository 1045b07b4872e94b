"""What users call: arguments are checked here, and the work is handed on."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from autoprec.diagnosis.rules import RULES
from autoprec.errors import InputError, UnrepairedError
from autoprec.policy import Policy, load_policy

if TYPE_CHECKING:
    from fastai.learner import Learner

    from autoprec.diagnosis.finding import Diagnosis, Rule
    from autoprec.evidence import Evidence
    from autoprec.outcome import Outcome
    from autoprec.precision import Setting
    from autoprec.remedies import Remedy, Subject
    from autoprec.runner import Runner

__all__ = ["diagnose", "examine", "fit_safely", "remediate", "run"]

PolicySource = str | os.PathLike[str] | Mapping[str, Any] | Policy


def fit_safely(
    learn: Learner,
    epochs: int,
    lr: float | slice | None = None,
    *,
    schedule: str = "one_cycle",
    policy: PolicySource = "default",
    audit: str | os.PathLike[str] | None = None,
    emulate_cuda: bool = False,
    on_failure: Literal["raise", "return"] = "raise",
    seed: int | None = None,
    extra_rules: Sequence[Rule] = (),
    extra_remedies: Sequence[Remedy[Any]] = (),
    **fit_kwargs: Any,
) -> Learner:
    """Probe, repair if needed, train, and return the learner; `learn.autoprec` is the outcome.

    Args:
        learn: a fastai Learner. If it carries `to_fp16(...)` or `to_bf16()`, that precision and its scaler
            arguments are what is tried first; if not, the policy's `precision.prefer` decides.
        epochs: epochs to train, from 1 on.
        lr: learning rate (for "one_cycle" its peak), float or slice; None: the learner's own.
        schedule: "fit", "one_cycle", "flat_cos" or "fine_tune": fastai's method of that name.
        policy: name of a shipped policy, path of a YAML file, a dict, or a Policy.
        audit: path of the audit file (JSON lines); None: `<learn.path>/autoprec/<run id>.jsonl`.
        emulate_cuda: on a CPU, real 16-bit arithmetic under CUDA's op lists, instead of fp32.
        on_failure: what to do when nothing allowed makes the run healthy: "raise" an UnrepairedError, or "return"
            the learner as it was before the call.
        seed: seeds python, numpy and torch before anything is run; None leaves the generators as they are.
        extra_rules: rules of your own, asked before autoprec's.
        extra_remedies: remedies of your own, tried before the policy's ladder for the modes in their `for_modes`.
        **fit_kwargs: passed on to fastai's fit method (wd, cbs, pct_start, …).

    Returns:
        The same learner, trained. If nothing was wrong the training is bit for bit fastai's own.

    Raises:
        InputError: an argument or a learner that cannot be used. The learner is as it was, as for all that follow.
        PolicyError: a policy that cannot be used.
        AuditError: the audit file cannot be written.
        UnrepairedError: the run cannot be made healthy; holds the outcome.
    """
    if on_failure not in ("raise", "return"):
        raise InputError(f"on_failure is {on_failure!r}; allowed are 'raise' and 'return'")
    outcome = run(
        learn,
        epochs,
        lr,
        schedule=schedule,
        policy=policy,
        audit=audit,
        emulate_cuda=emulate_cuda,
        seed=seed,
        extra_rules=extra_rules,
        extra_remedies=extra_remedies,
        **fit_kwargs,
    )
    if outcome.result == "unrepaired" and on_failure == "raise":
        raise UnrepairedError(outcome)
    return outcome.learner


def run(
    learn: Learner,
    epochs: int,
    lr: float | slice | None = None,
    *,
    schedule: str = "one_cycle",
    policy: PolicySource = "default",
    audit: str | os.PathLike[str] | None = None,
    emulate_cuda: bool = False,
    seed: int | None = None,
    extra_rules: Sequence[Rule] = (),
    extra_remedies: Sequence[Remedy[Any]] = (),
    **fit_kwargs: Any,
) -> Outcome:
    """Do what `fit_safely` does, and return the Outcome ("healthy", "repaired", "unrepaired", "inconclusive").

    Arguments and errors are those of `fit_safely`, but an unrepaired run is returned, not raised.
    """
    return _whole(
        learn,
        epochs,
        lr,
        lambda runner: runner.run(),
        schedule=schedule,
        policy=policy,
        audit=audit,
        emulate_cuda=emulate_cuda,
        seed=seed,
        extra_rules=extra_rules,
        extra_remedies=extra_remedies,
        **fit_kwargs,
    )


def remediate(learn: Learner, epochs: int, lr: float | slice | None = None, **kwargs: Any) -> Outcome:
    """Probe and repair the learner for a planned fit without making the fit; see `run` for the arguments."""
    return _whole(learn, epochs, lr, lambda runner: runner.remediate(), **kwargs)


def _whole(
    learn: Learner,
    epochs: int,
    lr: float | slice | None,
    work: Callable[[Runner], Outcome],
    *,
    schedule: str = "one_cycle",
    policy: PolicySource = "default",
    audit: str | os.PathLike[str] | None = None,
    emulate_cuda: bool = False,
    seed: int | None = None,
    extra_rules: Sequence[Rule] = (),
    extra_remedies: Sequence[Remedy[Any]] = (),
    **fit_kwargs: Any,
) -> Outcome:
    from autoprec.audit.journal import Journal, new_run_id
    from autoprec.repair import Repair
    from autoprec.runner import Runner

    chosen = load_policy(policy)
    subject, cbs = _subject(learn, epochs, lr, schedule, chosen, emulate_cuda, seed, fit_kwargs)
    run_id = new_run_id()
    path = Path(audit) if audit is not None else Path(learn.path) / "autoprec" / f"{run_id}.jsonl"
    with Journal(path, run_id) as journal, _Seeded(seed), _added(learn, cbs):
        outcome = work(Runner(Repair(subject, chosen, journal, (*extra_rules, *RULES), extra_remedies)))
    remember(learn, outcome, subject.setting)
    return outcome


def diagnose(
    learn: Learner,
    epochs: int = 1,
    lr: float | slice | None = None,
    *,
    schedule: str = "one_cycle",
    policy: PolicySource = "default",
    audit: str | os.PathLike[str] | None = None,
    emulate_cuda: bool = False,
    seed: int | None = None,
    extra_rules: Sequence[Rule] = (),
    **fit_kwargs: Any,
) -> Diagnosis:
    """Probe the planned fit and say what is wrong; changes nothing.

    Arguments are those of `fit_safely`; without `audit` nothing is written to disk.

    Returns:
        The diagnosis; `.primary` is the finding to act on, None if nothing was found.
    """
    return examine(
        learn,
        epochs,
        lr,
        schedule=schedule,
        policy=policy,
        audit=audit,
        emulate_cuda=emulate_cuda,
        seed=seed,
        extra_rules=extra_rules,
        **fit_kwargs,
    )[1]


def examine(
    learn: Learner,
    epochs: int,
    lr: float | slice | None = None,
    *,
    schedule: str = "one_cycle",
    policy: PolicySource = "default",
    audit: str | os.PathLike[str] | None = None,
    emulate_cuda: bool = False,
    seed: int | None = None,
    extra_rules: Sequence[Rule] = (),
    **fit_kwargs: Any,
) -> tuple[Evidence, Diagnosis]:
    """What `diagnose` does, returning the evidence too."""
    from autoprec.audit.journal import Journal, new_run_id
    from autoprec.repair import Repair
    from autoprec.snapshot import preserved

    chosen = load_policy(policy)
    subject, cbs = _subject(learn, epochs, lr, schedule, chosen, emulate_cuda, seed, fit_kwargs)
    journal = Journal(os.devnull if audit is None else audit, new_run_id())
    with journal, preserved(learn), _Seeded(seed), _added(learn, cbs):
        return Repair(subject, chosen, journal, (*extra_rules, *RULES)).look()


def _subject(
    learn: Any,
    epochs: object,
    lr: object,
    schedule: object,
    policy: Policy,
    emulate_cuda: object,
    seed: object,
    fit_kwargs: Mapping[str, Any],
) -> tuple[Subject, list[Any]]:
    """Check the arguments and say what is to be run; the user's callbacks for the fit are returned apart."""
    from fastai.learner import Learner

    from autoprec.learner import AutoPrecisionLearner
    from autoprec.precision import Setting, availability, carried, device_type
    from autoprec.remedies import Subject
    from autoprec.schedule import FitPlan

    if isinstance(learn, AutoPrecisionLearner):
        raise InputError("learn is an AutoPrecisionLearner; call its own fit_safely(), or pass its .learn")
    if not isinstance(learn, Learner):
        raise InputError(f"learn is a {type(learn).__name__}; give a fastai Learner")
    if not isinstance(emulate_cuda, bool):
        raise InputError(f"emulate_cuda is {emulate_cuda!r}; allowed are True and False")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32):
        raise InputError(f"seed is {seed!r}; give a whole number from 0 to 2**32 - 1, or None")
    _check_learner(learn)
    kwargs = dict(fit_kwargs)
    cbs = kwargs.pop("cbs", None)
    plan = FitPlan.checked(learn, epochs, lr, schedule, kwargs)
    _, setting = carried(learn)
    if setting is None:
        # A repaired learner comes back without a precision callback; its next fit goes on where that one was.
        setting = _remembered(learn)
    if setting is None:
        can = availability(device_type(learn), emulate_cuda=emulate_cuda)
        usable = {"fp16": can.fp16, "bf16": can.bf16_native, "fp32": True}
        prefer = policy.precision.prefer
        setting = Setting(prefer if usable[prefer] else "fp32")
    as_list = list(cbs) if isinstance(cbs, (list, tuple)) else [] if cbs is None else [cbs]
    return Subject(learn, plan, setting, emulate_cuda), [c() if isinstance(c, type) else c for c in as_list]


def _check_learner(learn: Learner) -> None:
    params = list(learn.model.parameters())
    if not any(p.is_floating_point() for p in params):
        raise InputError(
            f"the model ({type(learn.model).__name__}) has {len(params)} parameters and none is floating point; "
            "there is nothing to train"
        )
    try:
        batches = len(learn.dls.train)
    except TypeError as e:
        raise InputError(
            "the training loader has no length; give it one (DataLoader(..., n=...)), as probes need to know "
            "the length of the planned fit"
        ) from e
    if batches == 0:
        n = getattr(learn.dls.train, "n", None)
        raise InputError(
            f"the training loader is empty ({n} samples, batch size {getattr(learn.dls.train, 'bs', None)}); "
            "give at least one batch (drop_last leaves out an incomplete one)"
        )
    _check_targets(learn)


def _check_targets(learn: Learner) -> None:
    """Draw one batch, and put the loaders back."""
    from autoprec.snapshot import preserved

    with preserved(learn):
        batch = learn.dls.train.one_batch()
        batch = batch if isinstance(batch, (tuple, list)) else (batch,)
        n_inp = getattr(learn.dls, "n_inp", 1 if len(batch) == 1 else len(batch) - 1)
        targets = len(batch) - n_inp
    if targets <= 0:
        raise InputError(
            f"a training batch has {len(batch)} elements, all of them inputs (dls.n_inp is {n_inp}): there is no "
            "target. fastai trains nothing then; give the loaders targets, or set dls.n_inp"
        )


class _Seeded:
    """Seeds the generators on entry, as fastai's set_seed does; None leaves them alone."""

    def __init__(self, seed: int | None) -> None:
        self.seed = seed

    def __enter__(self) -> None:
        if self.seed is not None:
            from fastai.torch_core import set_seed

            set_seed(self.seed)

    def __exit__(self, *_: object) -> None:
        """The run's own draws stay drawn, as after any fit."""


class _added:  # noqa: N801  # reads like fastai's added_cbs, which it wraps
    """The fit's own callbacks, attached for the whole run so that snapshots hold their state too."""

    def __init__(self, learn: Learner, cbs: list[Any]) -> None:
        self.learn, self.cbs = learn, cbs

    def __enter__(self) -> None:
        self.learn.add_cbs(self.cbs)

    def __exit__(self, *_: object) -> None:
        for cb in self.cbs:
            if cb in self.learn.cbs:
                self.learn.remove_cb(cb)


_outcomes: weakref.WeakKeyDictionary[Any, Outcome] = weakref.WeakKeyDictionary()
_settings: weakref.WeakKeyDictionary[Any, tuple[Setting, str]] = weakref.WeakKeyDictionary()


def remember(learn: Learner, outcome: Outcome, setting: Setting) -> None:
    """Make `learn.autoprec` the outcome, and keep what fastai's own callback cannot hold for the next fit.

    Nothing is put into the learner itself, which must export cleanly.
    """
    from fastai.learner import Learner

    # Without the learner: the map's value would keep its own key alive.
    _outcomes[learn] = outcome.model_copy().with_learner(None)
    _settings.pop(learn, None)
    if outcome.result != "unrepaired" and not setting.stock:
        _settings[learn] = (setting, _shape(learn.model))
    if not isinstance(getattr(Learner, "autoprec", None), property):
        Learner.autoprec = property(_recall)


def _recall(learn: Learner) -> Outcome | None:
    """The outcome of the last autoprec run on this learner; None if there was none."""
    found = _outcomes.get(learn)
    return None if found is None else found.model_copy().with_learner(learn)


def _remembered(learn: Learner) -> Setting | None:
    """The 16-bit setting with islands in which the learner was last trained, if its model is still built the same."""
    setting, shape = _settings.get(learn, (None, ""))
    return setting if setting is not None and shape == _shape(learn.model) else None


def _shape(model: Any) -> str:
    modules = [(n, type(m).__name__) for n, m in model.named_modules()]
    return repr((modules, [(n, tuple(p.shape)) for n, p in model.named_parameters()]))
