"""Environments: what the policy is asked and how it is scored. The worker's own configuration says which there are."""
