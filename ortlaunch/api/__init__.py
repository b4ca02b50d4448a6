"""The public Python API, which `ortlaunch` exports; the command line is an adapter over it.

It reads no command line and prints nothing, except where `progress=True` requests it. May import
everything on the control side; never cli, worker or torch.
"""
