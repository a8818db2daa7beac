"""A small inference server for the demo, tests and benchmarks: real dialects on a real socket, without a model."""
