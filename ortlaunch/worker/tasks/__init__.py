"""What the ranks of a run do: one module a task."""
