"""A correct and fast gradient norm for DeepSpeed, used only with known sources of DeepSpeed."""
