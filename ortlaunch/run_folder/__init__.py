"""The run folder, the only channel between the two sides: paths, file formats, locks, records.

Must not import a side, nor torch.
"""
