"""Equipment of the demo, the examples, the benchmarks and the tests. Imports nothing: a trainer has only numpy."""
