"""What every other room may use: errors, image specs, building from configs, files, the machine."""
