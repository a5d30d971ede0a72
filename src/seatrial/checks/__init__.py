"""Pure functions from facts, metrics and log lines to checks."""
