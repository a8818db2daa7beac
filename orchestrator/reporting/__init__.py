"""What a run says about itself: status, metrics, Prometheus, the HTTP endpoint."""
