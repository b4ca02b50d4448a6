"""The commands beside training.

They evaluate, export, generate, prepare data, run the selftest, submit, compare plans, and serve
training on devices.
"""
