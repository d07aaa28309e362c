"""Benchmarks, `imagegen benchmark`: what is measured, in which process, told how."""
