"""Tests of the public Python API that train nothing."""
