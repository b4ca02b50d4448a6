"""The process of one rank: `python ortlaunch/base/module_start.py ortlaunch.worker RUN_FOLDER`.

The control side never imports this package.
"""
