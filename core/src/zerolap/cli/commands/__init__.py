"""The commands, one file each: options, help and exit codes. What they do is imported when they are called."""
