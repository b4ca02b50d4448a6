"""The engine that runs the model's passes, its optimizer and one step of it."""
