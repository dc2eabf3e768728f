VERSION = "0.1.0"
"""The same as in pyproject.toml."""
