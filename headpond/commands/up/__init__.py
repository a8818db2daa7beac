"""`headpond up`: every process that a run needs on this machine, supervised from one terminal."""
