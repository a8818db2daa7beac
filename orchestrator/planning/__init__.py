"""Groups and steps: how many rollouts are planned, and which groups make a step."""
