"""The attendance of a run without Redis: no worker is announced, and every reply is used."""

from orchestrator.broker import Broker
from orchestrator.workforce.attendance import Attendance
from penstock.config import RunConfig

ANY_SEQUENCE = 1 << 62


def unattended(config: RunConfig) -> Attendance:
    return Attendance(config, Broker("redis://unused/0"), first_sequence=ANY_SEQUENCE)
