"""One file per command or group of commands: arguments in, text out."""
