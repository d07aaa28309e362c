"""Benchmarks, `python -m imagegen.benchmark`: what is measured, in which process, told how."""
