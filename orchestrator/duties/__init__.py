"""How duties of the event loop report errors, split long work, and crash in tests."""
