"""Backends that make rollouts: any OpenAI-compatible server (direct), or NeMo Gym's servers and agents."""
