"""One inference server: its requests, its connections, and how a response becomes a `Turn`."""
