"""Passes over the exported graph."""
