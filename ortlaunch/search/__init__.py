"""A sweep's study: which trials there are, which one comes next, which one stops early.

It starts no run: `api/sweeps.py` does. May import recipe and run_folder; nothing else imports Optuna.
"""
