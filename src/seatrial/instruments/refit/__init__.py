"""The refit proof: moves weights from a policy to a generator and shows bit for bit that they arrived."""
