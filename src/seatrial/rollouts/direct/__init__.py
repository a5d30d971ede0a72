"""Rollouts without NeMo Gym: one request to an OpenAI-compatible server, one verifier."""
