"""A stand-in; see the package."""
