"""Plain values for all other packages: errors, messages, dtypes, devices, features. Does not import torch."""
