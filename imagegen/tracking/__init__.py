"""What is recorded of runs: loggers, metrics.csv, wandb, and the table of runs."""
