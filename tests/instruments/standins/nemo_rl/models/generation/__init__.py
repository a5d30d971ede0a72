"""A stand-in: nothing of upstream."""
