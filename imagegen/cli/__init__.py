"""From the words that a user typed to a checked configuration, and errors as sentences."""
