"""Playing rollouts: the recorded policy, sessions for agents, and one rollout from its example
to its files."""
