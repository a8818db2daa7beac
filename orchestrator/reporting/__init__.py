"""What a run reports about itself: status, metrics, Prometheus, the HTTP endpoint. Handed what it reads."""
