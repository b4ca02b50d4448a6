"""The version of the package, for modules that the public API imports."""

__version__ = "0.1.0"
