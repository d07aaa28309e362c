"""Output distributions over the levels of a value."""
