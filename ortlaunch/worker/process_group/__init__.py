"""The process group, and what ranks agree on."""
