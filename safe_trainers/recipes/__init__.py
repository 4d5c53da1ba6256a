"""YAML recipes: read, validated, turned into arguments."""
