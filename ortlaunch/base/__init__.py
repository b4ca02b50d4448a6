"""The ground of every package: errors, processes, files and JSON, units, output, this machine.

It imports no other package of ortlaunch but the paths of a run folder.
"""
