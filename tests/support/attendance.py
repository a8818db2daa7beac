"""The attendance of a run without Redis: no worker is announced, and every reply is used."""

from headpond.config import RunConfig
from headpond.orchestrator.broker import Broker
from headpond.orchestrator.workforce.attendance import Attendance

ANY_SEQUENCE = 1 << 62


def unattended(config: RunConfig) -> Attendance:
    return Attendance(config, Broker("redis://unused/0"), first_sequence=ANY_SEQUENCE)
