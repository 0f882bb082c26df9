"""Everything that decides the weights: a file a recipe. command_line.py lists them."""
