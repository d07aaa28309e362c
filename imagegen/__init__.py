"""Autoregressive image models with linear attention: train, sample, complete, evaluate."""

__version__ = "0.1.0"
