"""The command `penstock`. Imports every other package; none imports it."""
