"""One store of all runs: import, compare, trend, gate, thresholds."""
