"""Variants of a recipe measured side by side: `ortlaunch bench`, and what `engine.name: auto` decides by."""
