"""One run on the control side: its folder, its plan settled once, its start and its verdict."""
