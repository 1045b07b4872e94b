"""What can go wrong, as few exception types as callers can tell apart.

Each is also a builtin that code written before autoprec already catches. A failure of *training* is
not here: that is a value, `Outcome`, and `UnrepairedError` only carries it to those who asked for an
exception (`on_failure="raise"`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autoprec.outcome import Outcome

__all__ = ["AuditError", "AutoprecError", "InputError", "PolicyError", "RestoreError", "UnrepairedError"]


class AutoprecError(Exception):
    """Base of all errors that autoprec raises itself."""


class InputError(AutoprecError, ValueError):
    """An argument or a learner that cannot be used; the text says the value seen, what is allowed and what to do."""


class PolicyError(AutoprecError, ValueError):
    """A policy that cannot be used; lists every fault with its line."""


class AuditError(AutoprecError, OSError):
    """An audit file that cannot be written or read."""


class RestoreError(AutoprecError, RuntimeError):
    """The learner could not be put back exactly as it was; the text names the parts that differ."""


class UnrepairedError(AutoprecError, RuntimeError):
    """No allowed remedy made the run healthy; the learner is as it was before the call.

    Attributes:
        outcome: the `Outcome` with diagnosis, attempts and the next step to take.
    """

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.explain())
        self.outcome = outcome
