"""The process group, and agreements among its ranks."""
