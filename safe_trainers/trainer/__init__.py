"""The classes above and below a TRL trainer, and the construction of a run."""
