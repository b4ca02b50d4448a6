"""The public Python API, which `ortlaunch` exports; the command line is an adapter over it.

A verb is one module of its name: its function, its request, and its start. The exported names read
no command line, and print nothing unless `progress=True` requests it. Functions that a verb of the
shell runs in its own process print what that process prints. May import everything on the control
side; never cli, worker or torch.
"""
