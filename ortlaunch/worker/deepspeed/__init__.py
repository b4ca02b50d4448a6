"""DeepSpeed with a gradient norm that is right and fast; its sources are guarded."""
