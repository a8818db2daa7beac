"""How the engine is asked: through the one `EngineClient` of a process."""

from penstock.policy.client import EngineClient

__all__ = ["EngineClient"]
