"""Conversion of a response's bytes to one validated `Turn`."""
