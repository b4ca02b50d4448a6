"""Repairs that change the exported graph or ORT's analysis of it."""
