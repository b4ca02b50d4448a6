"""One run of this command: its choices, its start, restarts and verdict. The folder is run_folder's."""
