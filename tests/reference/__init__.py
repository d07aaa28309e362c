"""Slow, literal versions of the equations, in float64: what the fast forms are measured against."""
