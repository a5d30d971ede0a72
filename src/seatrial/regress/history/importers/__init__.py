"""Files and directories that runs left, into runs and points; one module per kind."""
