"""Pure planning: hosts, world, batch, memory and DeepSpeed's settings."""
