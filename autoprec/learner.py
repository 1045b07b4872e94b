"""AutoPrecisionLearner: a Learner with autoprec's verbs on it.

A wrapper by delegation. What it does not know itself is read from, set on and called on the wrapped
Learner, so code that takes a Learner takes it too; but it is no Learner and hides nothing of one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from autoprec.errors import InputError
from autoprec.policy import Policy, load_policy

if TYPE_CHECKING:
    from fastai.learner import Learner

    from autoprec.diagnosis.finding import Diagnosis
    from autoprec.evidence import Evidence
    from autoprec.outcome import Outcome

__all__ = ["AutoPrecisionLearner"]

_OWN = ("learn", "policy", "emulate_cuda", "outcome")


class AutoPrecisionLearner:
    """Wraps a fastai Learner.

    Args:
        learn: the Learner; reading, setting and calling anything that is not autoprec's reaches it.
        policy: name of a shipped policy, path of a YAML file, a dict, or a Policy.
        emulate_cuda: on a CPU, real 16-bit arithmetic under CUDA's op lists.

    Attributes:
        learn: the wrapped Learner.
        policy: the loaded Policy.
        outcome: Outcome of the last run, None before it.

    Raises:
        InputError: `learn` is no Learner, or an AutoPrecisionLearner already.
        PolicyError: the policy cannot be used.
    """

    learn: Learner
    policy: Policy
    emulate_cuda: bool
    outcome: Outcome | None

    def __init__(
        self,
        learn: Learner,
        policy: str | os.PathLike[str] | Mapping[str, Any] | Policy = "default",
        *,
        emulate_cuda: bool = False,
    ) -> None:
        values = {
            "learn": _checked_learner(learn),
            "policy": load_policy(policy),
            "emulate_cuda": _checked_flag(emulate_cuda),
            "outcome": None,
        }
        self.__dict__.update(values)

    def probe(self, epochs: int = 1, lr: float | slice | None = None, **kwargs: Any) -> Evidence:
        """Run the probes of the planned fit and return the evidence; changes nothing. Arguments as `fit_safely`."""
        return self._look(epochs, lr, **kwargs)[0]

    def diagnose(self, epochs: int = 1, lr: float | slice | None = None, **kwargs: Any) -> Diagnosis:
        """Say what is wrong with the planned fit; changes nothing. Arguments as `fit_safely`."""
        return self._look(epochs, lr, **kwargs)[1]

    def _settings(self, given: dict[str, Any]) -> dict[str, Any]:
        """The wrapper's own policy and emulation, unless a call says otherwise."""
        return {"policy": self.policy, "emulate_cuda": self.emulate_cuda, **given}

    def _look(self, epochs: int, lr: float | slice | None, **kwargs: Any) -> tuple[Evidence, Diagnosis]:
        from autoprec.api import examine

        return examine(self.learn, epochs, lr, **self._settings(kwargs))

    def remediate(self, epochs: int = 1, lr: float | slice | None = None, **kwargs: Any) -> Outcome:
        """Probe and repair without fitting: the learner keeps the accepted changes. Arguments as `fit_safely`.

        Changes that belong to a fit (a lower lr) are not in the learner; they are in the outcome's `changes`.
        """
        from autoprec.api import remediate

        outcome = remediate(self.learn, epochs, lr, **self._settings(kwargs))
        self.__dict__["outcome"] = outcome
        return outcome

    def fit_safely(self, epochs: int, lr: float | slice | None = None, **kwargs: Any) -> AutoPrecisionLearner:
        """As `autoprec.fit_safely` with this wrapper's policy; returns the wrapper."""
        from autoprec.api import fit_safely
        from autoprec.errors import UnrepairedError

        try:
            fit_safely(self.learn, epochs, lr, **self._settings(kwargs))
        except UnrepairedError as e:
            self.__dict__["outcome"] = e.outcome
            raise
        self.__dict__["outcome"] = self.learn.autoprec
        return self

    def __getattr__(self, name: str) -> Any:
        # Only reached for names that are not our own. Unpickling asks before there is a learner to ask.
        if name == "learn" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.learn, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            check = _CHECKS.get(name)
            self.__dict__[name] = check(value) if check else value
        else:
            setattr(self.learn, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.learn, name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self.learn)})

    def __call__(self, event_name: str) -> Any:
        """Fire an event, as calling a Learner does."""
        return self.learn(event_name)

    def __enter__(self) -> Any:
        return self.learn.__enter__()

    def __exit__(self, *exc: object) -> Any:
        return self.learn.__exit__(*exc)

    def __getstate__(self) -> dict[str, Any]:
        return dict(self.__dict__)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __repr__(self) -> str:
        result = self.outcome.result if self.outcome else "not run"
        return f"AutoPrecisionLearner({type(self.learn.model).__name__}, policy={self.policy.name!r}, {result})"


def _checked_learner(learn: Any) -> Any:
    from fastai.learner import Learner

    if isinstance(learn, AutoPrecisionLearner):
        raise InputError("learn is an AutoPrecisionLearner already; wrap its .learn, or use it as it is")
    if not isinstance(learn, Learner):
        raise InputError(f"learn is a {type(learn).__name__}; give a fastai Learner")
    return learn


def _checked_flag(emulate_cuda: Any) -> bool:
    if not isinstance(emulate_cuda, bool):
        raise InputError(f"emulate_cuda is {emulate_cuda!r}; allowed are True and False")
    return emulate_cuda


_CHECKS: Mapping[str, Callable[[Any], Any]] = {
    "learn": _checked_learner,
    "policy": load_policy,
    "emulate_cuda": _checked_flag,
}
