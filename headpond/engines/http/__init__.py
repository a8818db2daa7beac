"""Requests to an inference server: client, transport, bodies as bytes."""
