"""Reward profiles: what a campaign's rollouts say of each task, of each group of tasks, and how sure that is."""
