"""Why rollouts are lost to training: causes of deaths and drops, staleness."""
