"""The location of weights and optimizer state in DeepSpeed's optimizers."""
