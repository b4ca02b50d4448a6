"""One rank's life: `python ortlaunch/start.py ortlaunch.worker RUN_FOLDER`. Never imported by the control side."""
