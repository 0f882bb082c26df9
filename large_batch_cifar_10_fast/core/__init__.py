"""What the programs share. Nothing here knows a recipe, and nothing here imports a program."""
