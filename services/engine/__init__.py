"""A small inference server for demo, tests and benchmarks: real dialects on a real socket, no model behind them."""
