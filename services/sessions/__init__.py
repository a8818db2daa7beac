"""The session server: any agent that knows an OpenAI-compatible URL plays a rollout, recorded token by token."""
