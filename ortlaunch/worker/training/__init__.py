"""Parts of the training loop: metrics, hooks, bad steps, stops, the summary."""
