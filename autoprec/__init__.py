"""Mixed-precision training for fastai that finds out why it fails and repairs it.

`autoprec.fit_safely(learn, epochs)` probes, diagnoses, repairs, trains and leaves an audit log. Names are
resolved on first use: reading a policy or a report imports neither torch nor fastai.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = [
    "AuditError",
    "AutoPrecisionLearner",
    "AutoprecError",
    "Diagnosis",
    "Finding",
    "InputError",
    "Outcome",
    "Policy",
    "PolicyError",
    "RestoreError",
    "UnrepairedError",
    "diagnose",
    "enable_logging",
    "fit_safely",
    "load_policy",
    "read_audit",
    "run",
]

_HOMES = {
    "AuditError": "autoprec.errors",
    "AutoPrecisionLearner": "autoprec.learner",
    "AutoprecError": "autoprec.errors",
    "Diagnosis": "autoprec.diagnosis.finding",
    "Finding": "autoprec.diagnosis.finding",
    "InputError": "autoprec.errors",
    "Outcome": "autoprec.outcome",
    "Policy": "autoprec.policy",
    "PolicyError": "autoprec.errors",
    "RestoreError": "autoprec.errors",
    "UnrepairedError": "autoprec.errors",
    "diagnose": "autoprec.api",
    "enable_logging": "autoprec.logs",
    "fit_safely": "autoprec.api",
    "load_policy": "autoprec.policy",
    "read_audit": "autoprec.audit.journal",
    "run": "autoprec.api",
}

if TYPE_CHECKING:
    from autoprec.api import diagnose, fit_safely, run
    from autoprec.audit.journal import read_audit
    from autoprec.diagnosis.finding import Diagnosis, Finding
    from autoprec.errors import AuditError, AutoprecError, InputError, PolicyError, RestoreError, UnrepairedError
    from autoprec.learner import AutoPrecisionLearner
    from autoprec.logs import enable_logging
    from autoprec.outcome import Outcome
    from autoprec.policy import Policy, load_policy


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'autoprec' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
