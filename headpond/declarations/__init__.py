"""The facts that each section of the configuration declares, and the import of the code that it
names."""
