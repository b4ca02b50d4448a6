"""`python -m ortlaunch`, for use if the command is not on PATH."""

from ortlaunch.cli import main

if __name__ == "__main__":
    main()
