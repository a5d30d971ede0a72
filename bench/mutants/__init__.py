"""Mutants as the measure of the proving levels: see `make mutants` and docs/mutants.md."""
