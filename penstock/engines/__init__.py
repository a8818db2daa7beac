"""One inference server: how it is asked, how its response becomes a Turn."""
