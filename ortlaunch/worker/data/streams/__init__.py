"""Text that is read while the training runs: URLs, windows of tokens on a disk, their samples."""
