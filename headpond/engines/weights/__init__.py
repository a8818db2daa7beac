"""An engine's weights: the labels of their versions, and the calls that load them."""
