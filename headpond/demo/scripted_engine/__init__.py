"""A small inference server for the demo, tests and benchmarks: real dialects on a real socket. Its completions are
scripted, or sampled from a small model.
"""
