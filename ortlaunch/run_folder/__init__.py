"""The run folder, which alone crosses between the sides: its paths, file formats, locks and records.

Must not import a side, nor torch.
"""
