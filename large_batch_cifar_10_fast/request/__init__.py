"""From what a user asks for to settings and a recipe, and whatever can be refused before training."""
