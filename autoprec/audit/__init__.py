"""The audit: what a run decided and why, one JSON line per event, and the report that is read from it."""

from autoprec.audit.events import EVENTS, SCHEMA_VERSION, Event
from autoprec.audit.journal import Audit, Journal, new_run_id, read_audit
from autoprec.audit.report import Report, fold

__all__ = ["EVENTS", "SCHEMA_VERSION", "Audit", "Event", "Journal", "Report", "fold", "new_run_id", "read_audit"]
