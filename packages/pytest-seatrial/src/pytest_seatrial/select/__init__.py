"""Runs only the tests that a change can reach."""
