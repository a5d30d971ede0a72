"""What runs inside the sandbox: passed to its interpreter as text, so nothing but the standard library is there."""
