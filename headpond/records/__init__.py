"""Records that several rooms compute or read: the result of a rollout, and the files that jobs read and write."""
