"""Fixtures shared by every folder of tests."""
