"""Data sets of images, and the loaders that feed training and evaluation."""
