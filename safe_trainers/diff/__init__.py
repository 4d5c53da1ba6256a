"""Records the values of a run by module, and finds the first module at which two recordings part, and why."""
