"""Reports on runs and files, and their renderers."""
