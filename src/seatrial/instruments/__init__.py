"""Everything that runs inside a loop's interpreter: standard library, torch and the loop's libraries only. It measures; the host judges."""
