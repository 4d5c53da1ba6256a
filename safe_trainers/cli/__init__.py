"""The commands of `safe-trainers`."""
