"""Rollout campaigns: rows x repeats, cut into shards, run as jobs, merged, profiled; nothing lost, nothing twice."""
