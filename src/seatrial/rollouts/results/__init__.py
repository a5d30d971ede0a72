"""What is made of collected rollouts: the merge, reward profiles, selections, new rewards, imports and exports."""
