"""One file for each command: it takes the configuration and calls what does the work."""
