"""The refit proof: moving weights from a policy to a generator, and showing bit for bit that they arrived."""
