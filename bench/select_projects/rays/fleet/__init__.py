"""A small fleet of Ray actors, made to be tested: most of its code runs in workers only."""

VERSION = "1.0"
