"""The orchestrator on a loop that times its steps: `python -m bench.harness.timed_orchestrator`."""

from bench.harness.step_timer import StepTimer
from headpond import config
from headpond.orchestrator import start
from headpond.orchestrator.loop import Orchestrator

if __name__ == "__main__":
    StepTimer(first=Orchestrator.drive_and_shut_down.__qualname__).install()
    start.run(config.load(None))
