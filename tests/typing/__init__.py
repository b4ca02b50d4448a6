"""Programs that only the type checker reads: `make check` runs mypy on them in strict mode."""
