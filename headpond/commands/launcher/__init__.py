"""The processes of a run on this machine: started, watched, started again and stopped by one command."""
