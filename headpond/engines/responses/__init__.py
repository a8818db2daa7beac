"""A response's bytes -> one validated `Turn`."""
