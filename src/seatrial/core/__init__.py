"""The vocabulary as frozen types, errors, configuration, files, and guarded readers: everything else may use it, and it uses nothing."""
