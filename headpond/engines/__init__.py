"""One inference server: its requests, its connections, and the conversion of a response to a
`Turn`."""
