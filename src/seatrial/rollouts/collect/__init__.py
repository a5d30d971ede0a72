"""Collecting the owed units of shards: how many at a time, what is tried again, what is written down, and when to end."""
