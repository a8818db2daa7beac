"""The orchestrator on a loop that times its steps: `python -m bench.harness.timed_orchestrator`."""

from bench.harness.step_timer import StepTimer
from orchestrator import start
from orchestrator.loop import Orchestrator
from penstock import config

if __name__ == "__main__":
    StepTimer(first=Orchestrator.drive_and_shut_down.__qualname__).install()
    start.run(config.load(None))
