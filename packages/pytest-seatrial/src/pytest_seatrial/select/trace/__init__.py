"""The tracer that runs inside pytest and every child process. Standard library only."""
