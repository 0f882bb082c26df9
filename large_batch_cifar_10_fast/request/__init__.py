"""What a user asks for: settings, the command line with its recipe, and the refusals that come before any training."""
