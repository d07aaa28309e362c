"""Fast generation: the recurrent step of a model, compiled for the machine at hand."""
