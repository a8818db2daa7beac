"""The session server: an agent plays a rollout through an OpenAI-compatible URL, recorded token by token."""
