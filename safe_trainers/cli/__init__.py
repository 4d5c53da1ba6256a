"""The command line, one small file per command; nothing heavy is imported before a command needs it."""
