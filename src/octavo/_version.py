"""The version, apart so that low layers may read it."""

__version__ = "0.1.0"
