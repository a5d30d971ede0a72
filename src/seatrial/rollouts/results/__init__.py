"""What is made of collected rollouts: selections, new rewards, the layouts of other tools."""
