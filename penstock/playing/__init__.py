"""Playing one rollout: the recorded policy, agent sessions, from example to files."""
