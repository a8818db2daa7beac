"""The command `penstock`: puts the others together; nobody imports it."""
