"""Causal attention mechanisms: each one trains in parallel and generates step by step."""
