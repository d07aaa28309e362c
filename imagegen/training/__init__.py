"""Training runs: the module, callbacks, optimizers, how a run begins, continues and stops."""
