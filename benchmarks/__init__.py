"""Scripts that measure; each writes its raw record under `benchmarks/results/`."""
