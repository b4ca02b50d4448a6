"""The commands beside training.

They evaluate, export, generate, prepare data, submit, compare plans, and serve
training on devices.
"""
