"""Checkpoints: read, checked and exported, and where a result comes from."""
