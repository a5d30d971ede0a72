"""The exact state of the change, proof that it was imported and used, and redaction of secrets."""
