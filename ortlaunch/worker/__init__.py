"""One rank's life: `python -m ortlaunch.worker RUN_FOLDER`. Never imported by the control side."""
