"""What an environment talks to: `RecordedPolicy` asks the engine, through the process's `EngineClient`, and records."""

from penstock.policy.client import EngineClient
from penstock.policy.dialects import Dialect, Renderer
from penstock.policy.recorded import RecordedPolicy

__all__ = ["Dialect", "EngineClient", "RecordedPolicy", "Renderer"]
