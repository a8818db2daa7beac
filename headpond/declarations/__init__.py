"""What a section of the configuration declares, and how the code that it names is found."""
