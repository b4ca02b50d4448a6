"""Tests of the study of a sweep, without a run."""
